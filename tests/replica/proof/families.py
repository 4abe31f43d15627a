"""Configurations of transformers' causal model types, as their classes make them without a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

# All model types, in the installed version.
MODEL_TYPES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
# What every checkpoint of a type states, and its class leaves open.
_STATED = {
    "head_dim": 64,
    "n_shared_experts": 1,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


def default_entries(model_type: str) -> dict[str, Any]:
    """Return config.json of a checkpoint of this type, of full size."""
    config = CONFIG_MAPPING[model_type]().to_dict()
    for name, value in _STATED.items():
        if name in config and (config[name] is None or name.endswith("token_id")):
            config[name] = value
    if config.get("num_key_value_heads", 0) is None:
        config["num_key_value_heads"] = config["num_attention_heads"]
    config["pad_token_id"] = 0
    config |= {
        "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]],
        "model_type": model_type,
    }
    return json.loads(json.dumps(config, default=str))


def write_config(folder: Path, entries: dict[str, Any]) -> Path:
    """Write config.json to a new folder, and return the folder."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(entries))
    return folder
