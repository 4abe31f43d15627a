"""How a checkpoint's hidden states become embeddings: its configuration for the library sentence-transformers.

| file | read |
|---|---|
| `modules.json` | the modules, in order: Transformer, Pooling, and maybe Normalize |
| the folder of Pooling, `config.json` | the mode of pooling |
| `config_sentence_transformers.json` | the text before each input |

A checkpoint without `modules.json` gets the last token's hidden state, normalised.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from quire.protos.errors import EngineError, UnsupportedField
from quire.protos.field_checks import Range
from quire.protos.unique_keys import parse_json
from quire.router.text.tokenizer import read_json_object

# The modes that are served, by their names in sentence-transformers, and `SamplingParams.pooling` of each.
_POOLINGS = {"lasttoken": "last", "mean": "mean"}
# The names of modes in files that sentence-transformers wrote before version 5.4.
_OLD_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_CHAINS = (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])


@dataclass(frozen=True, slots=True)
class EmbeddingFormat:
    """The way from the hidden states of an input's tokens to its embedding.

    Attributes
    ----------
    pooling
        One of `sampling_params.POOLINGS`.
    normalises
        Embeddings have length 1.
    prompt
        Text before each input that is a text.
    refusal
        Why the checkpoint's embeddings are not served; empty: they are served.
    """

    pooling: str = "last"
    normalises: bool = True
    prompt: str = ""
    refusal: str = ""

    @classmethod
    def load(cls, folder: str | Path) -> EmbeddingFormat:
        """Read a checkpoint's files. A file that cannot be read, or asks for more, is a `refusal`."""
        try:
            return _read(Path(folder))
        except ValueError as error:
            return cls(refusal=str(error))

    def check(self, dimensions: int | None, hidden_size: int) -> None:
        """Check that embeddings are served, with this number of values (None: all).

        Raises
        ------
        UnsupportedField
            The checkpoint's embeddings are not served.
        InvalidRequest
            `dimensions` is out of its bounds.
        """
        if self.refusal:
            raise UnsupportedField(
                f"the model's embeddings are not served: {self.refusal}", field="model"
            )
        if dimensions is not None:
            Range(1, hidden_size, is_integer=True).check("dimensions", dimensions)

    def finish(self, pooled: np.ndarray, dimensions: int | None) -> np.ndarray:
        """Return the embedding of a pooled hidden state: its first `dimensions` values, then normalised, float32.

        Raises
        ------
        EngineError
            The hidden state has no finite length, or cannot be normalised.
        """
        values = pooled[:dimensions].astype(np.float64)
        # A sum without rounding does not depend on the order of its terms.
        length = math.sqrt(math.fsum(np.square(values).tolist()))
        if not math.isfinite(length) or (self.normalises and length == 0):
            raise EngineError(f"the model computed a hidden state of length {length}")
        return (values / length if self.normalises else values).astype(np.float32)


def _read(folder: Path) -> EmbeddingFormat:
    """Raises ValueError for what is not served."""
    path = folder / "modules.json"
    if not path.is_file():
        return EmbeddingFormat()
    try:
        modules = parse_json(path.read_text(encoding="utf-8"))
        kinds = [module["type"].rpartition(".")[2] for module in modules]
        pooling_folder = PurePosixPath(modules[1]["path"])
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ValueError(f"{path.name} is not a list of modules: {error!r}") from error
    if kinds not in _CHAINS:
        raise ValueError(
            f"{path.name} must have the modules {' or '.join(', '.join(chain) for chain in _CHAINS)}, got "
            f"{', '.join(kinds)}"
        )
    if pooling_folder.is_absolute() or ".." in pooling_folder.parts:
        raise ValueError(
            f"{path.name}: the path {str(pooling_folder)!r} is outside of the checkpoint"
        )
    config = read_json_object(folder / pooling_folder / "config.json")
    prompt = _default_prompt(folder)
    if prompt and config.get("include_prompt") is False:
        raise ValueError("include_prompt must be true with a default prompt, got false")
    if read_json_object(folder / "sentence_bert_config.json").get("do_lower_case"):
        raise ValueError("sentence_bert_config.json: do_lower_case must be false, got true")
    return EmbeddingFormat(_pooling(config), kinds[-1] == "Normalize", prompt)


def _pooling(config: dict[str, Any]) -> str:
    modes = config.get("pooling_mode")
    if modes is None:
        old = [mode for name, mode in _OLD_MODES.items() if config.get(name)]
        modes = old or ["mean"]
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in _POOLINGS:
        raise ValueError(f"pooling_mode must be one of {', '.join(_POOLINGS)}, got {modes!r}")
    return _POOLINGS[modes[0]]


def _default_prompt(folder: Path) -> str:
    config = read_json_object(folder / "config_sentence_transformers.json")
    name, prompts = config.get("default_prompt_name"), config.get("prompts")
    if name is None:
        return ""
    prompt = prompts.get(name) if isinstance(prompts, dict) else None
    if not isinstance(prompt, str):
        raise ValueError(f"default_prompt_name must be one of the prompts, got {name!r}")
    return prompt
