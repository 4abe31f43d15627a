"""Checkpoints whose weights are stored in 8 or 4 bits: supported values of `quantization_config`, and tensor names.

| stored | what the weight is |
|---|---|
| `X.weight` F8_E4M3 [n, k], `X.weight_scale` [n, 1], [n], [1] or [] | the code times the scale of its channel |
| `X.weight` F8_E4M3 [n, k], `X.weight_scale_inv` [n / 128, k / 128] | the code times the scale of its block |
| `X.weight` I8 [n, k], `X.weight_scale` [n, 1] | the code times the scale of its channel |
| `X_blocks` U8 [experts, n, k / 32, 16], `X_scales` U8 [experts, n, k / 32] | MXFP4 of `X`, [experts, k, n] |
| `X.input_scale`, `X.activation_scale` | fixed scale of all activations; not used: one per token is more exact |
| `X.input_scale_ub` | bound to which activations are clamped; not read, because config.json has it too |
| `...self_attn.k_scale`, `v_scale`, and older names | scales of an FP8 KV cache, `kv_scales.py` |

MXFP4 has 32 numbers of 4 bits (E2M1) for one scale, which means 2 ^ (scale - 127); the model's tensor is the transpose.
The sources are compressed-tensors (llm-compressor, vLLM), fbgemm (Meta), AutoFP8, transformers' fine-grained FP8 (Qwen,
DeepSeek) and gpt-oss.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

# Tensors of such a checkpoint that are not tensors of the model.
EXTRA = re.compile(
    r".*\.(input_scale|input_scale_ub|activation_scale|"
    r"([kv]_proj\.)?(k_scale|v_scale|q_scale|kv_scale|output_scale))"
)
_FORMATS = ("float-quantized", "naive-quantized", "int-quantized")
# Those of `w4_checkpoint.py` too.
_METHODS = ("compressed-tensors", "fbgemm_fp8", "fp8", "gptq", "awq", "mxfp4")
_FBGEMM_BOUND = 1200.0  # transformers' default of activation_scale_ub
_BLOCK = (128, 128)  # transformers' default of weight_block_size
# Values of `num_bits` and `type` in compressed-tensors, by code.
_KINDS = {"fp8": ("float", 8), "int8": ("int", 8)}


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """How the weights of a checkpoint are stored."""

    method: str  # quant_method
    code: Literal["fp8", "int8", "mxfp4"]
    activation_bound: float | None = None  # activations are clamped to +- this value
    # Whether the checkpoint has fixed scales of activations, which are not used.
    has_fixed_activations: bool = False
    has_weights: bool = True  # False: the checkpoint has only scales of an FP8 cache
    block: tuple[int, int] | None = None  # rows and columns with one scale; None: a channel or all
    # Whether the format quantises activations too, so that a matrix product can read the codes.
    has_coded_activations: bool = True

    @property
    def is_multiplied(self) -> bool:
        """Whether linear layers keep the codes. Otherwise weights are decoded while they are read."""
        return self.code != "mxfp4" and self.block is None and self.has_coded_activations


def judge(raw: Any) -> WeightScheme | None:
    """Parse a `quantization_config`; None if it is empty, an object without entries.

    Raises
    ------
    ValueError
        The quantisation, or the shape of its scales, is not supported; the message names the entry.
    """
    if not isinstance(raw, Mapping):
        raise ValueError(f"must be an object with quant_method, is {raw!r}")
    if not raw:
        return None
    method = raw.get("quant_method")
    if method == "compressed-tensors":
        return _compressed_tensors(raw)
    if method == "fbgemm_fp8":
        return WeightScheme(method, "fp8", _positive(raw, "activation_scale_ub", _FBGEMM_BOUND))
    if method == "fp8":
        return _fp8(raw)
    if method == "mxfp4":
        return WeightScheme(method, "mxfp4")
    raise ValueError(
        f"quant_method {method!r} is not served; served are {', '.join(_METHODS)}. Use the checkpoint from which this "
        "one was made, or one in a served format"
    )


def _fp8(raw: Mapping[str, Any]) -> WeightScheme:
    _expect("fmt", raw.get("fmt", "e4m3"), ("e4m3", "float8_e4m3fn"))
    _expect("expert_dtype", raw.get("expert_dtype", "fp8"), ("fp8",))
    activations = _expect("activation_scheme", raw.get("activation_scheme"), ("dynamic", "static"))
    block = _block("weight_block_size", raw.get("weight_block_size"))
    return WeightScheme("fp8", "fp8", None, activations == "static", block=block)


def _compressed_tensors(raw: Mapping[str, Any]) -> WeightScheme:
    groups = _object("config_groups", raw.get("config_groups"))
    if groups:
        _expect("format", raw.get("format"), _FORMATS)
    if _object("sparsity_config", raw.get("sparsity_config")).get("format", "dense") != "dense":
        raise ValueError("sparsity_config is not served")
    if raw.get("transform_config"):
        raise ValueError("transform_config is not served")
    if not groups and not raw.get("kv_cache_scheme"):
        raise ValueError("config_groups must not be empty")
    if raw.get("kv_cache_scheme"):
        _check_kind("kv_cache_scheme", raw["kv_cache_scheme"], "fp8")
    schemes = [_group(f"config_groups.{name}", group) for name, group in groups.items()]
    if not schemes:
        return WeightScheme("compressed-tensors", "fp8", has_weights=False)
    for name, scheme in zip(groups, schemes, strict=True):
        if (scheme.code, scheme.block) != (schemes[0].code, schemes[0].block):
            raise ValueError(
                f"config_groups.{name} is {scheme.code} with blocks of {scheme.block}, the first group "
                f"{schemes[0].code} with {schemes[0].block}; served is one format for all groups"
            )
    return WeightScheme(
        "compressed-tensors",
        schemes[0].code,
        has_fixed_activations=any(s.has_fixed_activations for s in schemes),
        block=schemes[0].block,
        has_coded_activations=all(s.has_coded_activations for s in schemes),
    )


def _group(name: str, group: Any) -> WeightScheme:
    """Parse an entry of `config_groups`."""
    if not isinstance(group, Mapping):
        raise ValueError(f"{name} must be an object, is {group!r}")
    _expect(f"{name}.format", group.get("format") or _FORMATS[0], _FORMATS)
    weights = _object(f"{name}.weights", group.get("weights"))
    code: Literal["fp8", "int8"] = "int8" if weights.get("type") == "int" else "fp8"
    _check_kind(f"{name}.weights", group.get("weights"), code)
    strategies = ("channel", "tensor", "block") if code == "fp8" else ("channel", "tensor")
    strategy = _expect(f"{name}.weights.strategy", weights.get("strategy"), strategies)
    block = None
    if strategy == "block":
        block = _block(f"{name}.weights.block_structure", weights.get("block_structure") or _BLOCK)
    if group.get("output_activations"):
        raise ValueError(f"{name}.output_activations is not served")
    activations = group.get("input_activations")
    if activations is None:
        return WeightScheme("compressed-tensors", code, block=block, has_coded_activations=False)
    _check_kind(f"{name}.input_activations", activations, code)
    _expect(
        f"{name}.input_activations.strategy",
        activations.get("strategy"),
        ("token", "tensor") if block is None else ("token", "tensor", "group"),
    )
    is_fixed = activations.get("dynamic") is not True
    return WeightScheme("compressed-tensors", code, None, is_fixed, block=block)


def _check_kind(name: str, scheme: Any, code: str) -> None:
    """Raise ValueError unless a scheme is symmetric numbers of the kind that `code` names."""
    kind, bits = _KINDS[code]
    if not isinstance(scheme, Mapping):
        raise ValueError(f"{name} must be a scheme of 8-bit {kind}s, is {scheme!r}")
    found = (scheme.get("type"), scheme.get("num_bits"), scheme.get("symmetric", True))
    if found != (kind, bits, True):
        raise ValueError(
            f"{name}: type, num_bits and symmetric must be {kind!r}, {bits} and true, are {found}"
        )


def _object(name: str, value: Any) -> Mapping[str, Any]:
    """Return an entry that is an object or null."""
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{name} must be an object, is {value!r}")
    return value or {}


def _block(name: str, value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    is_pair = isinstance(value, list | tuple) and len(value) == 2
    if not is_pair or not all(type(size) is int and size > 0 for size in value):
        raise ValueError(f"{name} must be two positive integers, is {value!r}")
    return (value[0], value[1])


def _positive(raw: Mapping[str, Any], name: str, default: float) -> float:
    value = raw.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{name} must be a positive number, is {value!r}")
    return float(value)


def _expect(name: str, value: Any, allowed: tuple[str, ...]) -> Any:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, is {value!r}")
    return value
