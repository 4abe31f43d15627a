"""Bytes of a model's weights on the device, computed from the checkpoint's headers before loading.

On the CPU this is an upper bound: bfloat16 weights may be packed in 12 bits (`kernels/cpu/weight_code.py`), which
depends on their values.

Weights of linear layers are recognised by name and shape: matrices named `X.weight`, except embeddings, the output
head, experts (stacked when loaded) and routers. Tests compare the result with the loaded bytes for every architecture.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

from quire.replica.checkpoint.checkpoint import check_header, weight_files

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
_OTHER_MATRICES = re.compile(r".*(embed_tokens|lm_head|\.gate|\.router|\.experts\..+)\.weight")
_NOT_LOADED = re.compile(
    r".*(_scale|_scale_ub|rotary_emb\.inv_freq)"
)  # scales are counted with their weights
_MULTIPLE = {"int8": (4, 1), "fp8": (16, 16)}  # of input and output features
_SCALE_BYTES = 4  # a scale for each output feature, float32


def weight_bytes(folder: Path, dtype: str, weights: str) -> int:
    """Bytes of the loaded weights.

    Parameters
    ----------
    dtype
        float32, bfloat16 or float16, for weights that are not stored in 8 bits.
    weights
        auto, int8 or fp8, as in `EngineConfig`.
    """
    total = 0
    for name, shape, stored in _tensors(folder):
        elements = math.prod(shape)
        if stored == "F8_E4M3" or _is_narrowed(name, shape, weights):
            total += elements + _SCALE_BYTES * shape[0]
        else:
            total += elements * ELEMENT_BYTES[dtype]
    return total


def loading_bytes(folder: Path, dtype: str, weights: str) -> int:
    """Bytes of the weights during loading. int8 weights are loaded in full and converted afterwards."""
    return weight_bytes(folder, dtype, "auto" if weights == "int8" else weights)


def _tensors(folder: Path) -> Iterator[tuple[str, list[int], str]]:
    for file in weight_files(folder):
        for name, entry in check_header(file).items():
            if not _NOT_LOADED.fullmatch(name):
                yield name, entry["shape"], entry["dtype"]


def _is_narrowed(name: str, shape: list[int], weights: str) -> bool:
    if weights not in _MULTIPLE or len(shape) != 2 or not name.endswith(".weight"):
        return False
    if _OTHER_MATRICES.fullmatch(name):
        return False
    inputs, outputs = _MULTIPLE[weights]
    return shape[1] % inputs == 0 and shape[0] % outputs == 0
