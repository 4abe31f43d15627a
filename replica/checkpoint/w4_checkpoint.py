"""Checkpoints stored in 4 bits: supported values of `quantization_config`.

| quant_method | tensors of a linear layer X |
|---|---|
| gptq | `qweight` [k / 8, n], `qzeros` [groups, n / 8], `scales` [groups, n], `g_idx` [k] |
| awq (version gemm) | `qweight` [k, n / 8], `qzeros` [groups, n / 8], `scales` [groups, n] |
| compressed-tensors | `weight_packed` [n, k / 8], `weight_scale` [n, groups], `weight_zero_point` [n / 8, groups], |
| (pack-quantized) | `weight_g_idx` [k], `weight_shape` [2] |

Which layers are in 4 bits follows from the stored tensors, so `ignore`, `targets` and `modules_to_not_convert` are not
read. `replica/model/w4_formats.py` unpacks the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GROUP_SIZES = (32, 64, 128, -1)
_PACKED = "pack-quantized"


@dataclass(frozen=True, slots=True)
class W4Scheme:
    """The quantisation of a checkpoint stored in 4 bits."""

    method: str  # quant_method
    group_sizes: frozenset[int]  # input features that share a scale; -1: all
    zero_offset: int = 0  # added to a stored zero point, modulo 16


def is_four_bit(raw: Mapping[str, Any]) -> bool:
    """Whether a `quantization_config` is for `judge`."""
    method = raw.get("quant_method")
    if method == "compressed-tensors":
        groups = raw.get("config_groups")
        formats = [raw.get("format")]
        if isinstance(groups, dict):
            formats += [group.get("format") for group in groups.values() if isinstance(group, dict)]
        return _PACKED in formats
    return method in ("gptq", "awq")


def judge(raw: Mapping[str, Any]) -> W4Scheme:
    """Parse a `quantization_config`.

    Raises
    ------
    ValueError
        The quantisation is not supported; the message names the entry, its bounds and its value.
    """
    return {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed}[raw["quant_method"]](raw)


def _gptq(raw: Mapping[str, Any]) -> W4Scheme:
    _expect("bits", raw.get("bits"), (4,))
    size = _expect("group_size", raw.get("group_size"), GROUP_SIZES)
    # Version 1 stores each zero point minus 1.
    layout = _expect("checkpoint_format", raw.get("checkpoint_format", "gptq"), ("gptq", "gptq_v2"))
    _expect("pack_dtype", raw.get("pack_dtype", "int32"), ("int32",))
    for name in ("is_marlin_format", "lm_head"):
        _expect(name, raw.get(name, False), (False,))
    for name in ("desc_act", "sym"):
        _expect(name, raw.get(name, False), (False, True))
    # Keys that begin with "-:" exclude layers, others give layers of their own bits.
    own = [key for key in raw.get("dynamic") or {} if not key.startswith("-:")]
    if own:
        raise ValueError(f"dynamic gives {own[0]!r} entries of its own, which is not served")
    return W4Scheme("gptq", frozenset({size}), 1 if layout == "gptq" else 0)


def _awq(raw: Mapping[str, Any]) -> W4Scheme:
    _expect("bits", raw.get("bits", raw.get("w_bit")), (4,))
    size = _expect("group_size", raw.get("group_size", raw.get("q_group_size")), GROUP_SIZES)
    version = raw.get("version", "gemm")
    _expect("version", version.lower() if isinstance(version, str) else version, ("gemm",))
    _expect("zero_point", raw.get("zero_point", True), (True,))
    return W4Scheme("awq", frozenset({size}))


def _compressed(raw: Mapping[str, Any]) -> W4Scheme:
    if (raw.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise ValueError("sparsity_config is not served")
    for name in ("transform_config", "kv_cache_scheme"):
        if raw.get(name):
            raise ValueError(f"{name} is not served with weights of 4 bits")
    sizes = set()
    groups = raw.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ValueError(f"config_groups must be an object with entries, is {groups!r}")
    for key, group in groups.items():
        name = f"config_groups.{key}"
        _expect(f"{name}.format", group.get("format") or raw.get("format"), (_PACKED,))
        for part in ("input_activations", "output_activations"):
            if group.get(part):
                raise ValueError(f"{name}.{part} must be null: served are activations of 16 bits")
        weights = group.get("weights")
        if not isinstance(weights, dict):
            raise ValueError(f"{name}.weights must be an object, is {weights!r}")
        _expect(f"{name}.weights.type", weights.get("type", "int"), ("int",))
        _expect(f"{name}.weights.num_bits", weights.get("num_bits"), (4,))
        _expect(f"{name}.weights.symmetric", weights.get("symmetric", True), (False, True))
        strategy = weights.get("strategy")
        _expect(f"{name}.weights.strategy", strategy, ("group", "channel"))
        if strategy == "group":
            size = weights.get("group_size")
            sizes.add(_expect(f"{name}.weights.group_size", size, GROUP_SIZES[:-1]))
        else:
            sizes.add(-1)
    return W4Scheme("compressed-tensors", frozenset(sizes))


def _expect(name: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    # JSON's true is not 1.
    if not any(type(value) is type(one) and value == one for one in allowed):
        raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}, is {value!r}")
    return value
