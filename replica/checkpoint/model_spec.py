"""`ModelSpec`: shape and defaults of a checkpoint, read from its JSON files before any weight is loaded.

A class of transformers is served if `quire.replica.proof` finds it exact. This module refuses what a proof cannot show:
files of another form, values out of range, and options that change with the batch.

transformers chooses a model's class by `model_type`, not by `architectures`, and a configuration can name other files
to read (`configuration_files`) or code to run (`auto_map`). Therefore config.json is read once, here. transformers
builds its configuration from the same dictionary without the entries that refer to other files, and `_judge`
checks that the class which it will choose is the one in `architectures`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.protos.unique_keys import parse_json
from quire.replica.checkpoint import transformers_index, w4_checkpoint, weight_scheme
from quire.replica.checkpoint.layer_kinds import has_recurrent_layers, layer_kinds, query_heads
from quire.replica.checkpoint.rope_types import check_rope_types, short_context
from quire.replica.checkpoint.w4_checkpoint import W4Scheme
from quire.replica.checkpoint.weight_scheme import WeightScheme
from quire.replica.checkpoint.wrapped_text import (
    TEXT,
    causal_class,
    is_wrapper,
    text_config,
    text_entries,
    wrapper_class,
    wrapper_entries,
)
from quire.replica.kv_cache.groups import LayerGroup, LayerKind, group_layers

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Entries of config.json that are not passed to transformers: they make it read or run other files, enable its own
# quantiser (Quire reads that entry into `ModelSpec.scheme` or `w4`), load kernels from the hub, or are configurations
# that it would use instead of the checked entries (`PretrainedConfig.get_text_config`). Built-in classes need none.
# Neither do they need names that begin with an underscore or end with `_implementation`.
_LEFT_OUT = (
    "auto_map",
    "configuration_files",
    "trust_remote_code",
    "quantization_config",
    "compression_config",
    "use_kernels",
    "kernel_config",
    "custom_generate",
    "text_config",
    "decoder",
    "generator",
    "text_encoder",
    "encoder",
)
_CHOICE = "_implementation"  # of attention, of experts: some are kernels of the hub
# Values of entries that make attention bidirectional.
_NOT_CAUSAL = {"use_bidirectional_attention": True, "is_causal": False}
# Names of the feed-forward width and of the longest context in configurations of transformers.
_INTERMEDIATE_SIZES = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
_POSITIONS = (
    *("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len"),
    "seq_length",
)


class CheckpointError(ValueError):
    """A checkpoint is not supported; the message names the file, the entry and the reason."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shape and defaults of a checkpoint. Sizes are counts of elements."""

    path: Path
    architecture: str
    raw_config: dict[str, Any] = field(repr=False, compare=False)  # config.json, checked
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int  # most of a layer
    num_kv_heads: int  # most of a layer
    head_dim: int  # largest of a layer
    vocab_size: int
    max_position_embeddings: int  # longest context, with RoPE scaling
    # Longest context in which `longrope` has its short factors; None: RoPE does not depend on the context.
    short_context: int | None
    # Of each layer; None: it has no keys and values.
    kinds: tuple[LayerKind | None, ...]
    eos_token_ids: tuple[int, ...]
    checkpoint_dtype: str  # float32 | bfloat16 | float16, as stored
    # How weights of 8 bits or MXFP4 are stored; None: otherwise.
    scheme: WeightScheme | None = None
    w4: W4Scheme | None = None  # None if the checkpoint is not stored in 4 bits
    # Whether some layers are recurrent: they have a state of each running request.
    has_states: bool = False
    # Fraction of the weights that this process holds. With ranks, head counts are those of one rank as well.
    weight_share: float = 1.0

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """Groups of layers of one kind, full-attention groups first."""
        return group_layers(self.kinds)

    @property
    def kv_kinds(self) -> dict[int, LayerKind]:
        """Kinds of the layers that have keys and values, by layer."""
        return {layer: kind for layer, kind in enumerate(self.kinds) if kind is not None}

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Number of keys that a query sees in each layer, its own included; None: all."""
        return tuple(None if kind is None else kind.window for kind in self.kinds)

    @classmethod
    def from_checkpoint(cls, path: Path) -> ModelSpec:
        """Read and check a checkpoint folder.

        Parameters
        ----------
        path
            Folder with config.json; generation_config.json and tokenizer files are optional.

        Raises
        ------
        CheckpointError
            A file is missing or unreadable, or the model is not supported.
        """
        raw = read_json(path / "config.json")
        architecture = _judge(raw)
        try:
            config = text_config(build_config(raw))
        except Exception as error:  # each class of configuration checks its entries in its own way
            raise CheckpointError(
                f"{path / 'config.json'}: {type(error).__name__}: {error}"
            ) from error
        _check_rope(config)
        _check_names(config)
        kinds, has_states = _layer_facts(config)
        stored = [kind for kind in kinds if kind is not None]
        generation = read_json(path / "generation_config.json", optional=True)
        spec = cls(
            path=path,
            architecture=architecture,
            raw_config=raw,
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            intermediate_size=_intermediate_size(config),
            num_heads=max(query_heads(config), default=1),
            num_kv_heads=max((kind.num_kv_heads for kind in stored), default=1),
            head_dim=max((kind.head_dim for kind in stored), default=1),
            vocab_size=config.vocab_size,
            max_position_embeddings=_max_context(config),
            short_context=short_context(config),
            kinds=kinds,
            has_states=has_states,
            eos_token_ids=_eos_token_ids(path, raw, generation, config.vocab_size),
            checkpoint_dtype=_stored_dtype(raw),
            scheme=_scheme(raw),
            w4=_w4(raw),
        )
        _check_sizes(spec)
        return spec


def read_json(path: Path, optional: bool = False) -> dict[str, Any]:
    """Read a JSON object; returns {} if an optional file does not exist."""
    if optional and not path.is_file():
        return {}
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must be a JSON object, is {type(value).__name__}")
    return value


def build_config(raw: dict[str, Any]) -> PretrainedConfig:
    """Build transformers' configuration from the entries of config.json only.

    Parameters
    ----------
    raw
        Checked config.json: `ModelSpec.raw_config`.
    """
    from transformers import CONFIG_MAPPING

    own = wrapper_entries(raw, _own_entries) if is_wrapper(raw) else _own_entries(raw)
    return CONFIG_MAPPING[raw["model_type"]].from_dict(_with_special_floats(copy.deepcopy(own)))


def _with_special_floats(value: Any) -> Any:
    """Replace what transformers writes for floats that JSON lacks: {"__float__": "Infinity"}."""
    if isinstance(value, list):
        return [_with_special_floats(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
        return float(value["__float__"])
    return {key: _with_special_floats(item) for key, item in value.items()}


def _own_entries(entries: dict[str, Any]) -> dict[str, Any]:
    """Return the entries that describe a model, without those that make transformers read or run other files."""
    return {
        name: value
        for name, value in entries.items()
        if name not in _LEFT_OUT and not name.startswith("_") and not name.endswith(_CHOICE)
    }


def _judge(raw: dict[str, Any]) -> str:
    """Return the architecture; uses only the entries of config.json."""
    # Imports take seconds, so `import quire.replica.checkpoint` does without.
    transformers_index.install()
    from transformers import CONFIG_MAPPING

    named = raw.get("architectures") or []
    if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str):
        raise CheckpointError(f"config.json: architectures is {named}, must be a list of one name")
    model_type = raw.get("model_type")
    code = (
        "; config.json has auto_map: the model needs Python code from the checkpoint, which is never run"
        if "auto_map" in raw
        else ""
    )
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise CheckpointError(
            f"config.json: model_type is {model_type!r}, which the installed transformers does not have{code}"
        )
    made = causal_class(model_type)
    if named[0] not in (made, wrapper_class(model_type)):
        raise CheckpointError(
            f"config.json: architectures is {named}, but the causal model of model_type {model_type!r} is {made}{code}"
        )
    if named[0] != wrapper_class(model_type) and TEXT in CONFIG_MAPPING[model_type].sub_configs:
        raise CheckpointError(
            f"config.json: model_type {model_type!r} is the one of {wrapper_class(model_type)}, not of {named[0]}"
        )
    try:
        text = text_entries(raw)
    except ValueError as error:
        raise CheckpointError(f"config.json: {error}") from error
    _scheme(raw)
    _w4(raw)
    for name, refused in _NOT_CAUSAL.items():
        if raw.get(name) is refused or text.get(name) is refused:
            raise CheckpointError(
                f"config.json: {name} is {str(refused).lower()}: only causal attention is served"
            )
    return named[0]


def _stored_dtype(raw: dict[str, Any]) -> str:
    for entries in (raw, text_entries(raw)):
        if stated := entries.get("dtype") or entries.get("torch_dtype"):
            return str(stated)
    return "float32"


def _scheme(raw: dict[str, Any]) -> WeightScheme | None:
    config = _quantization(raw)
    if not config or w4_checkpoint.is_four_bit(config):
        return None
    try:
        return weight_scheme.judge(config)
    except ValueError as error:
        raise CheckpointError(f"config.json: quantization_config: {error}") from error


def _w4(raw: dict[str, Any]) -> W4Scheme | None:
    config = _quantization(raw)
    if not w4_checkpoint.is_four_bit(config):
        return None
    try:
        return w4_checkpoint.judge(config)
    except (ValueError, AttributeError, TypeError) as error:
        method = config["quant_method"]
        raise CheckpointError(f"config.json: quantization_config ({method}): {error}") from error


def _quantization(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the description of the checkpoint's quantisation; {} if it has none."""
    names = ("quantization_config", "compression_config")  # the second is older
    given = [entries.get(name) for entries in (raw, text_entries(raw)) for name in names]
    config: Any = next((value for value in given if value not in (None, {})), {})
    if not isinstance(config, dict):
        raise CheckpointError(
            f"config.json: quantization_config must be a JSON object, is {config!r}"
        )
    return config


def _check_rope(config: Any) -> None:
    try:
        check_rope_types(config)
    except ValueError as error:
        raise CheckpointError(f"config.json: {error}") from error


def _check_names(config: PretrainedConfig) -> None:
    """Check that the configuration has the entries from which a spec is made."""
    if getattr(config, "is_encoder_decoder", False):
        raise CheckpointError("config.json: is_encoder_decoder is true: only decoders are served")
    for names in (
        ("num_hidden_layers",),
        ("hidden_size",),
        ("num_attention_heads",),
        ("vocab_size",),
        _POSITIONS,
    ):
        has_own = config.is_heterogeneous and names == ("num_attention_heads",)
        if not has_own and not any(isinstance(_entry(config, name), int) for name in names):
            raise CheckpointError(
                f"config.json: model_type {config.model_type!r} has no entry {' or '.join(names)} for all layers"
            )


def _entry(config: PretrainedConfig, name: str) -> Any:
    """Return an entry that holds for all layers; None: there is none."""
    try:
        return getattr(config, name, None)
    except (
        RuntimeError
    ):  # transformers raises a kind of it for an entry that differs between layers
        return None


def _intermediate_size(config: PretrainedConfig) -> int:
    """Return the width of the feed-forward layers, for the memory of a step. Default: four times the hidden size."""
    sizes = (_entry(config, name) for name in _INTERMEDIATE_SIZES)
    return next((size for size in sizes if isinstance(size, int)), 4 * config.hidden_size)


def _layer_facts(config: Any) -> tuple[tuple[LayerKind | None, ...], bool]:
    """Return each layer's kind, and whether some layers are recurrent."""
    try:
        return layer_kinds(config), has_recurrent_layers(config)
    except ValueError as error:
        raise CheckpointError(f"config.json: {error}") from error


def _max_context(config: PretrainedConfig) -> int:
    """Return the longest context in tokens, as vLLM derives it.

    Long-context recipes keep `max_position_embeddings` at the trained length and give a RoPE factor. llama3 rescales
    frequencies within the stated length. Gemma 3 states the scaled length.
    """
    stated = next(n for n in (_entry(config, name) for name in _POSITIONS) if isinstance(n, int))
    rope = getattr(config, "rope_parameters", None) or {}
    if any(
        isinstance(value, dict) for value in rope.values()
    ):  # Gemma 3 has one entry per kind of layer
        return stated
    rope_type, factor = rope.get("rope_type", "default"), rope.get("factor") or 1.0
    if rope_type == "yarn":
        return int((rope.get("original_max_position_embeddings") or stated) * factor)
    return int(stated * factor) if rope_type == "linear" else stated


def _eos_token_ids(
    path: Path, raw: dict[str, Any], generation: dict[str, Any], vocab_size: int
) -> tuple[int, ...]:
    """Return the unique EOS ids of generation_config.json, config.json and the tokenizer.

    Chat fine-tunes often keep the base model's id in config.json, although a turn ends with the tokenizer's
    `eos_token`. A tokenizer's id beyond the vocabulary is dropped: it has no logit and can never be sampled.
    """
    ids: list[int] = []
    for name, source in (
        ("generation_config.json", generation),
        ("config.json", raw),
        ("config.json", text_entries(raw)),
    ):
        value = source.get("eos_token_id")
        own = value if isinstance(value, list) else [] if value is None else [value]
        for token in own:
            if type(token) is not int or not 0 <= token < vocab_size:
                raise CheckpointError(
                    f"{path / name}: eos_token_id must be in [0, vocab_size {vocab_size}), is {token!r}"
                )
        ids += own
    ids += [token for token in _tokenizer_eos(path) if token < vocab_size]
    return tuple(dict.fromkeys(ids))


def _tokenizer_eos(path: Path) -> list[int]:
    """Return the id of the tokenizer's eos_token; [] if the checkpoint does not define one."""
    token = read_json(path / "tokenizer_config.json", optional=True).get("eos_token")
    if isinstance(token, dict):  # an AddedToken
        token = token.get("content")
    if not isinstance(token, str):
        return []
    file = path / "tokenizer.json"
    tokenizer = read_json(file, optional=True)
    added, model = tokenizer.get("added_tokens") or [], tokenizer.get("model") or {}
    if not isinstance(added, list) or not isinstance(model, dict):
        raise CheckpointError(
            f"{file}: added_tokens must be a list and model an object, are {type(added).__name__} and "
            f"{type(model).__name__}"
        )
    found: list[Any] = [
        e.get("id") for e in added if isinstance(e, dict) and e.get("content") == token
    ]
    vocab = model.get("vocab")
    if not found and isinstance(vocab, dict) and token in vocab:
        found = [vocab[token]]
    for number in found:
        if type(number) is not int or number < 0:
            raise CheckpointError(
                f"{file}: the id of eos_token {token!r} must be an integer of at least 0, is {number!r}"
            )
    return found


def _check_sizes(spec: ModelSpec) -> None:
    for name in ("num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size"):
        value = getattr(spec, name)
        if not isinstance(value, int) or value < 1:
            raise CheckpointError(f"config.json: {name} must be a positive integer, is {value!r}")
    for kind in spec.kv_kinds.values():
        num_heads = kind.num_heads or spec.num_heads
        if num_heads % kind.num_kv_heads:
            raise CheckpointError(
                f"config.json: num_attention_heads {num_heads} is not a multiple of "
                f"num_key_value_heads {kind.num_kv_heads}"
            )
    if spec.checkpoint_dtype not in ("float32", "bfloat16", "float16"):
        raise CheckpointError(
            f"config.json: dtype is {spec.checkpoint_dtype!r}, served are float32, bfloat16, float16"
        )
