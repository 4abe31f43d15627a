"""Bytes that a checkpoint's weights take on the device, from its headers alone: before anything is loaded.

On the CPU at most: bfloat16 may be packed in 12 bits (`kernels/cpu/weight_code.py`), which only the weights can tell.

Which tensors are weights of linear layers is told by their names and shapes, as the served architectures have them:
matrices called `X.weight`, but embeddings, the output head, experts (stacked when loaded) and the routers in front of
them. The tests compare with what is loaded, for every architecture.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

from quire.replica.checkpoint.checkpoint import check_header, weight_files

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
_OTHER_MATRICES = re.compile(r".*(embed_tokens|lm_head|\.gate|\.router|\.experts\..+)\.weight")
_NOT_LOADED = re.compile(r".*(_scale|_scale_ub|rotary_emb\.inv_freq)")  # scales count with weights
_MULTIPLE = {"int8": (4, 1), "fp8": (16, 16)}  # of input and output features
_SCALE_BYTES = 4  # a scale for each output feature, float32


def weight_bytes(folder: Path, dtype: str, weights: str) -> int:
    """Of the loaded model.

    Parameters
    ----------
    dtype
        float32, bfloat16 or float16: what is not stored in 8 bits becomes.
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
    """While the weights are read: int8 comes after all of them are there."""
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
