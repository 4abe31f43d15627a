"""Scales of keys and values for an FP8 cache: fixed numbers by layer and head, read from the checkpoint.

Calibration tools (llm-compressor, AutoFP8) store scales that fit keys and values into E4M3's range of +-448: code =
x / scale. Without stored scales the scale is 1, as in vLLM: E4M3 has 4 significant bits for magnitudes between 2^-6 and
448, so only smaller or larger values need another scale. Scales are never measured while serving, because replicas
would differ, and a change would invalidate cached blocks.
"""

from __future__ import annotations

import logging
import re

import torch

from quire.replica.checkpoint.checkpoint import weight_files
from quire.replica.checkpoint.model_spec import CheckpointError, ModelSpec
from quire.replica.kv_cache.groups import LayerKind
from quire.replica.model.stored.weights import StoredTensor, list_tensors, read_tensors

logger = logging.getLogger(__name__)

_ATTENTION = r"(?:.+\.)?layers\.(\d+)\.self_attn\."
# The current name, and older ones.
_NAMES = {
    "k": re.compile(_ATTENTION + r"(?:k_scale|k_proj\.k_scale|k_proj\.output_scale|kv_scale)"),
    "v": re.compile(_ATTENTION + r"(?:v_scale|v_proj\.v_scale|v_proj\.output_scale|kv_scale)"),
}


def read_kv_scales(spec: ModelSpec) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Read scales of keys and values by layer, [kv_heads] float32 each; {} if the checkpoint has none.

    Raises
    ------
    CheckpointError
        A scale is not positive, has a wrong shape (neither one number nor one per head), or is missing for keys or for
        values.
    """
    stored = list_tensors(weight_files(spec.path)).values()
    found: dict[str, dict[int, torch.Tensor]] = {}
    for kind, pattern in _NAMES.items():
        named = {t.name: int(m[1]) for t in stored if (m := pattern.fullmatch(t.name))}
        scales = read_tensors(
            (t for t in stored if t.name in named), lambda t: torch.empty(t.shape, dtype=t.dtype)
        )
        found[kind] = {
            named[t.name]: _checked(spec.kv_kinds[named[t.name]], t, value) for t, value in scales
        }
    lone = found["k"].keys() ^ found["v"].keys()
    if lone:
        raise CheckpointError(
            f"{spec.path}: layer {min(lone)} has a scale of its cache for keys or for values only"
        )
    absent = sum(kind.source is None for kind in spec.kv_kinds.values()) - len(found["k"])
    if absent:
        logger.info("KV cache in FP8: %d of %d layers have scale 1", absent, spec.num_layers)
    return {layer: (k, found["v"][layer]) for layer, k in found["k"].items()}


def _checked(kind: LayerKind, tensor: StoredTensor, value: torch.Tensor) -> torch.Tensor:
    scales = value.float().reshape(-1)
    if len(scales) not in (1, kind.num_kv_heads):
        raise CheckpointError(
            f"{tensor.file}: {tensor.name!r} must be one number or one for each of {kind.num_kv_heads} heads, is "
            f"{list(tensor.shape)}"
        )
    if not (torch.isfinite(scales) & (scales > 0)).all():
        raise CheckpointError(
            f"{tensor.file}: {tensor.name!r} must be finite and positive, is {scales.tolist()}"
        )
    return scales.expand(kind.num_kv_heads).clone()
