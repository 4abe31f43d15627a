"""Bytes of a model's weights on the device, computed from the checkpoint's headers before loading.

On the CPU the result is an upper bound: the compiled library packs bfloat16 weights in 12 bits where their values allow
it (`kernels/cpu/weight_code.py`).

Only linear layers are quantised or keep codes of 8 bits, so they must be distinguished from other weights, by name and
shape: they are matrices named `X.weight`, except embeddings, the output head, routers and experts. Experts are not
linear layers once loaded, because transformers stacks their weights in one tensor. Tests compare the result with the
loaded bytes for every architecture.

Other codes of a checkpoint are decoded to the served dtype and count as such: MXFP4 in bfloat16 four times its bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from quire.replica.checkpoint.checkpoint import check_header, weight_files

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
# Matrices that are never quantised.
_OTHER_MATRICES = re.compile(r".*(embed_tokens|lm_head|\.gate|\.router|\.experts\..+)\.weight")
# Scales of weights are counted with the weights; the model computes inv_freq.
_NOT_LOADED = re.compile(r".*(_scale|_scale_ub|_scale_inv|_scales|rotary_emb\.inv_freq)")
# Tensors of layers in 4 bits (`w4_checkpoint.py`): numbers, and what has a value for each group or input feature.
_NUMBERS = re.compile(r".*\.(qweight|weight_packed)")
_ZEROS = re.compile(r".*\.(qzeros|weight_zero_point|weight_shape)")  # counted with the scales
_ORDERS = re.compile(r".*\.(g_idx|weight_g_idx)")
# Of a group: on the CPU a float32 scale and two copies of the zero point, on a GPU at most that.
_GROUP_BYTES = 6
_WORD_BYTES = 4
# A linear layer is quantised only if its features are multiples of these numbers.
_MULTIPLE = {"int8": (4, 1), "fp8": (16, 16)}  # of input and output features
_CODES = ("F8_E4M3", "I8")
_SCALE_BYTES = (
    4  # float32; one for each output feature, of `weights: int8` one for each group of it
)
_INT8_GROUP = 64  # `SCALE_SIZE` of kernels/cpu/cpu_linear.py


def weight_bytes(
    folder: Path, dtype: str, weights: str, names: Collection[str] | None = None
) -> int:
    """Return the bytes of the weights after loading.

    Parameters
    ----------
    dtype
        float32, bfloat16 or float16: dtype of the weights that are not quantised.
    weights
        auto, int8 or fp8: storage format of linear layers; auto quantises none, but keeps int8 weights of a checkpoint
        in bfloat16. FP8 weights of a checkpoint are kept by fp8, and decoded otherwise.
    names
        Stored tensors that are loaded; None: all.
    """
    total = 0
    for name, shape, stored in _tensors(folder):
        if names is not None and name not in names:
            continue
        elements = math.prod(shape) * (2 if _is_mxfp4(name, stored) else 1)
        is_kept = (stored, weights) == ("F8_E4M3", "fp8") or (stored, dtype) == ("I8", "bfloat16")
        if _NUMBERS.fullmatch(name) or _ORDERS.fullmatch(name):
            total += elements * _WORD_BYTES
        elif name.endswith((".scales", ".weight_scale")):
            total += elements * _GROUP_BYTES
        elif is_kept and _is_linear(name, shape, "fp8"):
            total += elements + _SCALE_BYTES * shape[0]
        elif _is_narrowed(name, shape, weights):
            groups = -(-shape[1] // _INT8_GROUP) if weights == "int8" else 1
            total += elements + _SCALE_BYTES * shape[0] * groups
        else:
            total += elements * ELEMENT_BYTES[dtype]
    return total


def loading_bytes(
    folder: Path, dtype: str, weights: str, names: Collection[str] | None = None
) -> int:
    """Return the bytes that the weights take while they are loaded.

    These exceed `weight_bytes` for int8, because int8 weights are loaded in `dtype` and converted afterwards, and for
    weights that are decoded, because the codes of one tensor are in memory too.
    """
    loaded = weight_bytes(folder, dtype, "auto" if weights == "int8" else weights, names)
    codes = (
        math.prod(shape)
        for name, shape, stored in _tensors(folder)
        if _is_mxfp4(name, stored) or (stored in _CODES and name.endswith(".weight"))
    )
    is_decoded = weights != "fp8" or any(
        _is_mxfp4(name, stored) for name, _, stored in _tensors(folder)
    )
    return loaded + (max(codes, default=0) if is_decoded else 0)


def _tensors(folder: Path) -> Iterator[tuple[str, list[int], str]]:
    entries = {n: e for file in weight_files(folder) for n, e in check_header(file).items()}
    for name, entry in entries.items():
        has_groups = f"{name.removesuffix('_scale')}_packed" in entries
        if has_groups or not (_NOT_LOADED.fullmatch(name) or _ZEROS.fullmatch(name)):
            yield name, entry["shape"], entry["dtype"]


def _is_mxfp4(name: str, stored: str) -> bool:
    return name.endswith("_blocks") and stored == "U8"


def _is_narrowed(name: str, shape: list[int], weights: str) -> bool:
    return weights in _MULTIPLE and _is_linear(name, shape, weights)


def _is_linear(name: str, shape: list[int], weights: str) -> bool:
    """Whether a tensor is the weight of a linear layer with a shape that `weights` can have."""
    if len(shape) != 2 or not name.endswith(".weight"):
        return False
    if _OTHER_MATRICES.fullmatch(name):
        return False
    inputs, outputs = _MULTIPLE[weights]
    return shape[1] % inputs == 0 and shape[0] % outputs == 0
