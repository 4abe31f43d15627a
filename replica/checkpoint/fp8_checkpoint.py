"""Checkpoints stored in FP8: supported values of `quantization_config`, and names of their scales.

| tensor | what |
|---|---|
| `X.weight` F8_E4M3 [n, k], `X.weight_scale` [n, 1], [n], [1] or [] | the weight is the stored code times the scale |
| `X.input_scale` | fixed scale of all activations, from a calibration; not used: one per token is more exact |
| `X.input_scale_ub` | bound to which activations are clamped; not read, because config.json has it too |
| `...self_attn.k_scale`, `v_scale`, and older names | scales of an FP8 KV cache, `kv_scales.py` |

The formats compressed-tensors (llm-compressor, vLLM), fbgemm (Meta) and plain fp8 (AutoFP8) have these tensors.
Block-wise scales (DeepSeek, Qwen: `weight_scale_inv`) are rejected: the FP8 matrix product supports one scale per
channel or per tensor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Tensors of an FP8 checkpoint that are not tensors of the model.
EXTRA = re.compile(
    r".*\.(input_scale|input_scale_ub|([kv]_proj\.)?(k_scale|v_scale|q_scale|kv_scale|output_scale))"
)
_FORMATS = ("float-quantized", "naive-quantized")
_METHODS = ("compressed-tensors", "fbgemm_fp8", "fp8")
_FBGEMM_BOUND = 1200.0  # transformers' default of activation_scale_ub


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """The quantisation of a checkpoint stored in FP8."""

    method: str  # quant_method
    activation_bound: float | None = None  # activations are clamped to +- this value
    # Whether the checkpoint has fixed scales of activations, which are not used.
    has_fixed_activations: bool = False
    has_weights: bool = True  # False: the checkpoint has only scales of an FP8 cache


def judge(raw: Mapping[str, Any]) -> Fp8Scheme:
    """Parse a `quantization_config`.

    Raises
    ------
    ValueError
        The quantisation, or the shape of its scales, is not supported; the message names the entry.
    """
    method = raw.get("quant_method", "unknown")
    if method == "compressed-tensors":
        return _compressed_tensors(raw)
    if method == "fbgemm_fp8":
        bound = raw.get("activation_scale_ub", _FBGEMM_BOUND)
        if isinstance(bound, bool) or not isinstance(bound, (int, float)) or not bound > 0:
            raise ValueError(f"activation_scale_ub must be a positive number, is {bound!r}")
        return Fp8Scheme(method, float(bound))
    if method == "fp8":
        if raw.get("weight_block_size"):
            raise ValueError(
                f"weight_block_size is {raw['weight_block_size']}: served are scales for a channel or a tensor"
            )
        _expect("fmt", raw.get("fmt", "e4m3"), ("e4m3", "float8_e4m3fn"))
        scheme = _expect("activation_scheme", raw.get("activation_scheme"), ("dynamic", "static"))
        return Fp8Scheme(method, None, scheme == "static")
    raise ValueError(
        f"quant_method {method!r} is not served; served are {', '.join(_METHODS)}, gptq, awq"
    )


def _compressed_tensors(raw: Mapping[str, Any]) -> Fp8Scheme:
    if raw.get("config_groups"):
        _expect("format", raw.get("format"), _FORMATS)
    if (raw.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise ValueError("sparsity_config is not served")
    if raw.get("transform_config"):
        raise ValueError("transform_config is not served")
    groups = raw.get("config_groups") or {}
    if not groups and not raw.get("kv_cache_scheme"):
        raise ValueError("config_groups must not be empty")
    is_fixed = False
    for name, group in groups.items():
        weights = group.get("weights")
        _check_float8(f"config_groups.{name}.weights", weights)
        _expect(
            f"config_groups.{name}.weights.strategy", weights.get("strategy"), ("channel", "tensor")
        )
        activations = group.get("input_activations")
        _check_float8(f"config_groups.{name}.input_activations", activations)
        _expect(
            f"config_groups.{name}.input_activations.strategy",
            activations.get("strategy"),
            ("token", "tensor"),
        )
        if group.get("output_activations"):
            raise ValueError(f"config_groups.{name}.output_activations is not served")
        is_fixed = is_fixed or activations.get("dynamic") is not True
    if raw.get("kv_cache_scheme"):
        _check_float8("kv_cache_scheme", raw["kv_cache_scheme"])
    return Fp8Scheme("compressed-tensors", None, is_fixed, bool(groups))


def _check_float8(name: str, scheme: Any) -> None:
    """Raise ValueError unless a scheme is symmetric 8-bit floats."""
    if not isinstance(scheme, dict):
        raise ValueError(f"{name} must be a scheme of 8-bit floats, is {scheme!r}")
    found = (scheme.get("type"), scheme.get("num_bits"), scheme.get("symmetric", True))
    if found != ("float", 8, True):
        raise ValueError(
            f"{name}: type, num_bits and symmetric must be 'float', 8 and true, are {found}"
        )


def _expect(name: str, value: Any, allowed: tuple[str, ...]) -> Any:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, is {value!r}")
    return value
