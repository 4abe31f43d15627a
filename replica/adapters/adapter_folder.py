"""Reads an adapter's folder in PEFT's format (LoRA), and refuses by name what the engine cannot apply.

```
 adapter_config.json          r, lora_alpha, use_rslora, target_modules, ...
 adapter_model.safetensors    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight   [r, in]
                              base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight   [out, r]
```

A layer computes W x + scale * B (A x), with scale = lora_alpha / r, or lora_alpha / sqrt(r) with `use_rslora`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from quire.protos.adapter_ref import CONFIG_FILE, WEIGHTS_FILE
from quire.protos.errors import InvalidRequest
from quire.replica.checkpoint.model_spec import CheckpointError
from quire.replica.model.layers.linear_parts import LinearPart
from quire.replica.model.stored.weights import StoredTensor, list_tensors, read_tensors

_MAX_CONFIG_BYTES = 1 << 20
_TENSOR = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<side>[AB])\.weight")
# Fields with any value: they describe the training, or what the file of weights says as well.
_IGNORED = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "eva_config", "exclude_modules", "inference_mode"),
        *("layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout", "megatron_core"),
        *("peft_type", "peft_version", "qalora_group_size", "r", "revision", "runtime_config"),
        *("target_modules", "task_type", "use_rslora"),
    )
)  # fmt: skip
_REASONS = {
    "use_dora": "DoRA is not supported",
    "modules_to_save": "whole modules cannot be replaced per request",
    "rank_pattern": "all layers must have one rank",
    "alpha_pattern": "all layers must have one alpha",
    "trainable_token_indices": "embeddings cannot be adapted",
    "fan_in_fan_out": "only weights stored as [out, in] are supported",
}
# Other initialisations have changed the weights of the model that the adapter belongs to.
_INITIALISATIONS = (True, False, "gaussian", "eva", "orthogonal")


class LowRank(NamedTuple):
    """An adapter of one linear layer."""

    down: torch.Tensor  # A, [rank, in]
    up: torch.Tensor  # B, [out, rank]
    scale: float


def refusal(problem: str) -> InvalidRequest:
    """The error for an adapter that cannot be used."""
    return InvalidRequest(problem, field="model")


def read_adapter(
    folder: Path, layers: Mapping[str, LinearPart], max_rank: int, dtype: torch.dtype
) -> dict[str, LowRank]:
    """Read and check an adapter.

    Parameters
    ----------
    layers
        The linear layers that can be adapted, by name. Of a layer that a rank has in part, the matrices are cut.
    max_rank
        Largest rank.
    dtype
        Type of the result.

    Returns
    -------
    The adapters by name of their layer, on the CPU.

    Raises
    ------
    InvalidRequest
        The folder is no adapter, or one that the engine cannot apply; the message names the reason.
    """
    try:
        config = _read_config(folder / CONFIG_FILE)
        rank, scale = _check_config(folder, config, max_rank)
        stored = list_tensors([folder / WEIGHTS_FILE])
        pairs = _pairs(folder, stored)
        parts: dict[str, list[LinearPart]] = {}
        for part in layers.values():
            parts.setdefault(part.of_checkpoint.name, []).append(part)
        for name, (down, up) in pairs.items():
            _check_shapes(folder, name, down, up, parts, rank)
        own = {
            part.name: _cut(down, up, part)
            for name, (down, up) in pairs.items()
            for part in parts[name]
        }
        return _read_weights(own, scale, dtype)
    except (CheckpointError, OSError, ValueError) as error:
        raise refusal(f"{folder}: {error}") from error


def _read_config(path: Path) -> dict[str, Any]:
    if path.stat().st_size > _MAX_CONFIG_BYTES:
        raise ValueError(f"{path.name} has more than {_MAX_CONFIG_BYTES} bytes")
    config = json.loads(path.read_text())
    if not isinstance(config, dict):
        raise ValueError(f"{path.name} must be an object")
    return config


def _check_config(folder: Path, config: Mapping[str, Any], max_rank: int) -> tuple[int, float]:
    """Return rank and scale."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise refusal(f"{folder}: peft_type must be LORA, got {kind!r}")
    for field, reason in _REASONS.items():
        if config.get(field):
            raise refusal(f"{folder}: {field} is {config[field]!r}: {reason}")
    if config.get("bias", "none") != "none":
        raise refusal(f"{folder}: bias must be 'none', got {config['bias']!r}")
    if config.get("init_lora_weights", True) not in _INITIALISATIONS:
        raise refusal(
            f"{folder}: init_lora_weights is {config['init_lora_weights']!r}, which changes the model's own weights; "
            "convert the adapter to plain LoRA"
        )
    known = _IGNORED | _REASONS.keys() | {"bias", "init_lora_weights"}
    for field in config.keys() - known:
        if config[field]:
            raise refusal(f"{folder}: {field} is {config[field]!r}, which is not supported")
    rank: Any = config.get("r")
    alpha: Any = config.get("lora_alpha")
    if type(rank) is not int or not 1 <= rank <= max_rank:
        raise refusal(f"{folder}: r must be 1 to {max_rank} (max_adapter_rank), got {rank!r}")
    if type(alpha) not in (int, float) or not math.isfinite(alpha):
        raise refusal(f"{folder}: lora_alpha must be a number, got {alpha!r}")
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _pairs(
    folder: Path, stored: Mapping[str, StoredTensor]
) -> dict[str, tuple[StoredTensor, StoredTensor]]:
    """Group the stored tensors by layer."""
    sides: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            what = "embeddings cannot be adapted" if "embedding" in name else "no matrix of LoRA"
            raise refusal(f"{folder}: tensor {name!r}: {what}")
        sides.setdefault(match["layer"], {})[match["side"]] = tensor
    for layer, pair in sides.items():
        if len(pair) < 2:
            raise refusal(f"{folder}: {layer} has lora_{next(iter(pair))} alone")
    if not sides:
        raise refusal(f"{folder}: {WEIGHTS_FILE} has no tensor")
    return {layer: (pair["A"], pair["B"]) for layer, pair in sides.items()}


def _check_shapes(
    folder: Path,
    name: str,
    down: StoredTensor,
    up: StoredTensor,
    parts: Mapping[str, list[LinearPart]],
    rank: int,
) -> None:
    if name not in parts:
        raise refusal(f"{folder}: the model has no linear layer {name!r} that can be adapted")
    layer = parts[name][0].of_checkpoint
    expected = ((rank, layer.in_features), (layer.out_features, rank))
    if (down.shape, up.shape) != expected:
        raise refusal(
            f"{folder}: {name}: lora_A and lora_B must be {expected[0]} and {expected[1]}, got {down.shape} and "
            f"{up.shape}"
        )
    for tensor in (down, up):
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise refusal(f"{folder}: tensor {tensor.name!r} must be float32, bfloat16 or float16")


def _cut(
    down: StoredTensor, up: StoredTensor, part: LinearPart
) -> tuple[StoredTensor, StoredTensor]:
    """Return the matrices of a layer, or of a rank's part of it."""
    whole = part.whole
    if whole is None:
        return down, up
    names = [f"{tensor.name} of {part.name}" for tensor in (down, up)]
    down = down.columns(names[0], *whole.columns)
    return down, up.rows(names[1], *whole.rows)


def _read_weights(
    pairs: Mapping[str, tuple[StoredTensor, StoredTensor]], scale: float, dtype: torch.dtype
) -> dict[str, LowRank]:
    ordered = sorted((t for pair in pairs.values() for t in pair), key=lambda t: t.offset)
    read: dict[str, torch.Tensor] = {}
    for tensor, value in read_tensors(ordered, lambda t: torch.empty(t.shape, dtype=dtype)):
        if not torch.isfinite(value).all():
            raise refusal(f"{tensor.file}: {tensor.name!r} has a number that is not finite")
        read[tensor.name] = value
    return {
        name: LowRank(read[down.name], read[up.name], scale) for name, (down, up) in pairs.items()
    }
