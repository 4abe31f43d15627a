"""What a checkpoint is: `ModelSpec`, read from its JSON files before any weight is touched.

Only architectures that the exactness tests cover are served. Everything else, and every option of a covered
architecture that would change the result in a way those tests do not see, is refused by name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.replica import fp8_checkpoint
from quire.replica.fp8_checkpoint import Fp8Scheme
from quire.replica.groups import LayerGroup, group_layers

ARCHITECTURES = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MistralForCausalLM",
    "Olmo2ForCausalLM",
    "SmolLM3ForCausalLM",
    "GraniteForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GptOssForCausalLM",
    "Phi3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
# Other rope types change their frequencies with the longest sequence of the batch.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class CheckpointError(ValueError):
    """A checkpoint that is not served; the message names the file, the entry and the reason."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A checkpoint's shape and defaults. Tokens and sizes are counts of elements."""

    path: Path
    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    windows: tuple[int | None, ...]  # per layer: keys a query sees, itself included; None = all
    eos_token_ids: tuple[int, ...]
    checkpoint_dtype: str  # float32 | bfloat16 | float16, as stored
    temperature: float | None = None  # defaults of generation_config.json; None = not stated
    top_p: float | None = None
    top_k: int | None = None
    fp8: Fp8Scheme | None = None  # of a checkpoint whose weights are stored in FP8

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The layers by what their queries see."""
        return group_layers([(w, None, self.num_kv_heads, self.head_dim) for w in self.windows])

    @classmethod
    def from_checkpoint(cls, path: Path) -> ModelSpec:
        """Read and judge a checkpoint folder.

        Parameters
        ----------
        path
            Folder with config.json, and generation_config.json and tokenizer files where they exist.

        Raises
        ------
        CheckpointError
            A file is missing or unreadable, or the model is not one that is served.
        """
        raw = read_json(path / "config.json")
        architecture = _judge(raw)
        from transformers import (
            AutoConfig,
        )  # takes seconds to import: only after the cheap refusals

        try:
            config = AutoConfig.from_pretrained(
                path, local_files_only=True, trust_remote_code=False
            )
        except (ValueError, TypeError, KeyError, OSError) as error:
            raise CheckpointError(f"{path / 'config.json'}: {error}") from error
        _judge_rope(config)
        heads = config.num_attention_heads
        generation = read_json(path / "generation_config.json", optional=True)
        top_k = generation.get("top_k")
        spec = cls(
            path=path,
            architecture=architecture,
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vocab_size=config.vocab_size,
            max_position_embeddings=config.max_position_embeddings,
            windows=_windows(config),
            eos_token_ids=_eos_token_ids(path, raw, generation),
            checkpoint_dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
            temperature=generation.get("temperature"),
            top_p=generation.get("top_p"),
            top_k=None if top_k is None else int(top_k),
            fp8=_fp8(raw),
        )
        _check_sizes(spec)
        return spec


def read_json(path: Path, optional: bool = False) -> dict[str, Any]:
    """A JSON object; {} for an optional file that does not exist."""
    if optional and not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must be a JSON object, is {type(value).__name__}")
    return value


def _judge(raw: dict[str, Any]) -> str:
    """The architecture, if it is served; looks at nothing but config.json's own entries."""
    if "auto_map" in raw:
        raise CheckpointError(
            "config.json has auto_map: the model needs Python code from the checkpoint, which is never run"
        )
    _fp8(raw)
    named = raw.get("architectures") or []
    if len(named) != 1 or named[0] not in ARCHITECTURES:
        raise CheckpointError(
            f"config.json: architectures is {named}; served, because tests prove them exact, are "
            f"{', '.join(ARCHITECTURES)}"
        )
    name, activation = "hidden_act", "silu"
    if named[0].startswith("Gemma"):
        name, activation = "hidden_activation", "gelu_pytorch_tanh"
    if raw.get(name, activation) != activation:
        raise CheckpointError(f"config.json: {name} is {raw[name]!r}, served is {activation!r}")
    if raw.get("use_bidirectional_attention"):
        raise CheckpointError(
            "config.json: use_bidirectional_attention is true: only causal attention is served"
        )
    return named[0]


def _fp8(raw: dict[str, Any]) -> Fp8Scheme | None:
    config = raw.get("quantization_config") or raw.get("compression_config")  # its older name
    if not config:
        return None
    try:
        return fp8_checkpoint.judge(config)
    except (ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(f"config.json: quantization_config: {error}") from error


def _judge_rope(config: Any) -> None:
    parameters = getattr(config, "rope_parameters", None) or {}
    # One set for all layers, or one for each kind of layer.
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for entry in nested or [parameters]:
        rope_type = entry.get("rope_type", "default")
        if rope_type not in ROPE_TYPES:
            raise CheckpointError(
                f"config.json: rope type {rope_type!r} depends on the longest sequence of a batch or is not "
                f"covered by tests; served are {', '.join(ROPE_TYPES)}"
            )


def _windows(config: Any) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        types = [
            "full_attention" if window is None else "sliding_attention"
        ] * config.num_hidden_layers
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise CheckpointError(
            f"config.json: layer_types has {sorted(unknown)}; served are full_attention, sliding_attention"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _eos_token_ids(path: Path, raw: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
    """generation_config.json's, else config.json's, else the id of the tokenizer's eos_token."""
    for source in (generation, raw):
        value = source.get("eos_token_id")
        if value is not None:
            return tuple(value) if isinstance(value, list) else (value,)
    token = read_json(path / "tokenizer_config.json", optional=True).get("eos_token")
    if isinstance(token, dict):  # an AddedToken
        token = token.get("content")
    added = read_json(path / "tokenizer.json", optional=True).get("added_tokens", [])
    return tuple(entry["id"] for entry in added if entry.get("content") == token)


def _check_sizes(spec: ModelSpec) -> None:
    for name in ("num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size"):
        value = getattr(spec, name)
        if not isinstance(value, int) or value < 1:
            raise CheckpointError(f"config.json: {name} must be a positive integer, is {value!r}")
    if spec.num_heads % spec.num_kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads {spec.num_heads} is not a multiple of "
            f"num_key_value_heads {spec.num_kv_heads}"
        )
    if len(spec.windows) != spec.num_layers:
        raise CheckpointError(
            f"config.json: layer_types has {len(spec.windows)} entries for {spec.num_layers} layers"
        )
    if spec.checkpoint_dtype not in ("float32", "bfloat16", "float16"):
        raise CheckpointError(
            f"config.json: dtype is {spec.checkpoint_dtype!r}, served are float32, bfloat16, float16"
        )
    for token in spec.eos_token_ids:
        if not isinstance(token, int) or not 0 <= token < spec.vocab_size:
            raise CheckpointError(
                f"eos_token_id {token!r} is not in [0, vocab_size {spec.vocab_size})"
            )
