"""The built-in model with a long context, for requests of agents.

Agents send more tokens than the built-in model was trained on. With a sliding window every token sees a short
distance only, as in training, so the same weights take a prompt of any length.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from quire.replica.builtin_model import CHECKPOINT

_WINDOWED = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "max_position_embeddings": 128 * 1024,
    "sliding_window": 1024,
}


def make(folder: Path) -> Path:
    """Make the checkpoint. Its weights are those of the installed package, so each run makes it again."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(CHECKPOINT, folder)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | _WINDOWED, indent=1))
    return folder
