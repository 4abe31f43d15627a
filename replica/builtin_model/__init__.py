"""The built-in model: a small Llama with its tokenizer. `README.md` says how it was trained.

It is the default model of `quire serve`, and the tests use it as a real checkpoint.
"""

from pathlib import Path

#: Folder with the checkpoint, in the layout of `transformers.PreTrainedModel.from_pretrained`.
CHECKPOINT: Path = Path(__file__).resolve().parent / "checkpoint"

__all__ = ["CHECKPOINT"]
