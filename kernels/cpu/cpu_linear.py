"""Linear layers with packed weights on the CPU: fast for few rows, with the same bits for any number of rows.

    out[m, n] = sum_k x[m, k] w[n, k] (+ bias[n]) (+ residual[m, n])

Needs the compiled library. `native/linear_tile.h` describes the layout, the loops and why a row's bits depend on that
row alone. For the 1 to 32 rows of a decode step vendor libraries read the weights at half the memory's speed or less,
and they choose the order of additions by the number of rows. The kernel here serves any number of rows, so the weights
are stored only once.

    weight = PackedWeight.pack([w_q, w_k, w_v], 4096)      # once; columns of all parts
    out = packed_linear(x, weight)

bfloat16 weights are stored in 12 bits each, without loss, if nearly all weights allow it (`weight_code.py`): three
quarters of the bytes, and the same bits of every result.

With `int8=True` the weights of a bfloat16 layer are stored as round(w / scale). 64 input features of an output feature
share a scale: their largest |w| divided by 127. This is 53% of the bytes. The kernel multiplies numbers by scales and
rounds to bfloat16 before it uses them: the result has the bits of the bfloat16 weight that `unpack` returns.

`PackedWeight.of_numbers` packs weights of 4 bits with a scale and a zero point for each group of input features
(`native/linear_groups.h`). Number minus zero point is exact in bfloat16, and a group's sum is scaled in float32: the
result is that of the dequantised float32 weight up to the rounding of sums. Bytes: N K / 2, and 6 N for each group.

Bytes: (N K + M K + M N) itemsize up to 128 rows, where coded weights count three quarters. The weights are read once
more, from the cache, for each further 128 rows. Flops: 2 M N K.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from quire.kernels.cpu import native_library
from quire.kernels.cpu.weight_code import CodeArrays, Coder, WeightCode
from quire.kernels.cpu.weight_panels import (
    PANEL_COLUMNS,
    GroupArrays,
    WeightGroups,
    pack_numbers,
    pack_rows,
    unpack_numbers,
)
from quire.kernels.huge_pages import ask_for_huge_pages

_DTYPES = {torch.float32: 0, torch.bfloat16: 2}  # enum dtype of native/attention.h
# Columns at a time in which a weight is decoded and packed again if coding does not pay.
_DECODED_COLUMNS = 1024
# Input features that share a scale in int8. With 128, or one scale for each output feature, trained models lose more
# (docs/models.md); with 32 the scales take 11% of the bytes.
SCALE_SIZE = 64
# Input features that share a scale, in weights of 4 bits; a group may also have all of them.
GROUP_SIZES = (32, 64, 128)
LIMITS = "float32, or bfloat16 with an even number of input features"


class LinearCall(ctypes.Structure):
    """`struct linear_call` of native/linear.h."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("weight", ctypes.c_void_p),
        ("code", ctypes.POINTER(CodeArrays)),
        ("groups", ctypes.POINTER(GroupArrays)),
        ("in_strips", ctypes.c_int64),
        ("scales", ctypes.c_void_p),
        ("scale_steps", ctypes.c_int64),
        ("bias", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("residual_stride", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("steps", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
        ("unit_rows", ctypes.c_int64),
        ("holds_two_chunks", ctypes.c_int64),
        ("team", ctypes.c_void_p),
    ]

    @classmethod
    def of(cls, weight: PackedWeight, bias: torch.Tensor | None) -> LinearCall:
        """Set the fields that all calls with a weight and its bias share. The caller keeps both alive.

        Raises
        ------
        ValueError
            The bias does not come from `weight.pad_bias`.
        """
        size = len(weight.data) * PANEL_COLUMNS
        if bias is not None and (bias.dtype != torch.float32 or bias.shape != (size,)):
            raise ValueError(f"bias: must come from pad_bias, got {list(bias.shape)} {bias.dtype}")
        return cls(
            weight=weight.data.data_ptr(),
            code=weight.code and ctypes.pointer(weight.code.arrays),
            groups=weight.groups and ctypes.pointer(weight.groups.arrays),
            in_strips=weight.in_strips,
            scales=None if weight.scales is None else weight.scales.data_ptr(),
            scale_steps=weight.scale_size // 2,
            bias=None if bias is None else bias.data_ptr(),
            steps=weight.depth * weight.dtype.itemsize // 4,
            columns=weight.columns,
            dtype=_DTYPES[weight.dtype],
        )


def supports(in_features: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the library is installed and supports weights with this number of input features, dtype and device."""
    return (
        device.type == "cpu"
        and dtype in _DTYPES
        and in_features * dtype.itemsize % 4 == 0
        and native_library.load() is not None
    )


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """The weight [columns, depth] of a linear layer, or of several layers with the same input, packed in panels."""

    # [panels, words, 64] int32. A word is one float32, two bfloat16 or four int8; zeros after the last column. In
    # strips a panel is [4, words, 16], the layout for AMX. Coded weights: [panels, words, 48]. 4 bits:
    # [panels, words, 16].
    data: torch.Tensor
    columns: int  # output features
    depth: int  # input features
    dtype: torch.dtype  # dtype of the activations, and of the weights unless they are int8
    in_strips: bool
    scales: torch.Tensor | None = None  # [panels, groups, 64] float32 of int8 weights
    scale_size: int = 0  # input features that share a scale of int8 weights
    code: WeightCode | None = None
    groups: WeightGroups | None = None  # of 4-bit weights

    @classmethod
    def pack(
        cls,
        parts: Iterable[torch.Tensor],
        columns: int | None = None,
        *,
        int8: bool = False,
        coded: bool = True,
    ) -> PackedWeight:
        """Pack the concatenation of weights.

        Parameters
        ----------
        parts
            [columns of the part, depth] each. An iterator may free a part when the next one is requested.
        columns
            Columns of all parts together; optional if `parts` is one tensor.
        int8
            Store bfloat16 weights in 8 bits; `depth` must be a multiple of 4.
        coded
            Store bfloat16 weights in 12 bits if that saves a tenth of the bytes. Weights for AMX are not coded.

        Raises
        ------
        ValueError
            The parts have different depths or dtypes, or `supports` is False for them.
        """
        target, dtype, depth, done = None, None, 0, 0
        for part in parts:
            if target is None:
                columns = part.shape[0] if columns is None else columns
                dtype, depth = part.dtype, part.shape[1]
                _check_weight(part, int8)
                is_coded = coded and dtype == torch.bfloat16 and not int8 and not _in_strips(dtype)
                target = Coder(columns, depth) if is_coded else _Panels(columns, part, int8)
            if part.shape[1:] != (depth,) or part.dtype != dtype:
                raise ValueError(
                    f"parts: must be [columns, {depth}] {dtype}, got {list(part.shape)} {part.dtype}"
                )
            done += part.shape[0]
            if done > columns:
                raise ValueError(f"parts: must have {columns} columns in all, got more")
            target.add(_aligned(part))
        if target is None or done != columns:
            raise ValueError(f"parts: must have {columns} columns in all, got {done}")
        if isinstance(target, _Panels):
            return cls(
                target.data,
                columns,
                depth,
                dtype,
                target.in_strips,
                target.scales,
                target.scale_size,
            )
        saves = target.finish()
        packed = cls(target.coded, columns, depth, dtype, in_strips=False, code=target.code)
        if saves:
            return packed
        columns_at_once = range(0, columns, _DECODED_COLUMNS)
        ids = torch.arange(columns)
        again = (packed.rows(ids[first : first + _DECODED_COLUMNS]) for first in columns_at_once)
        return cls.pack(again, columns, coded=False)

    @classmethod
    def of_numbers(
        cls, words: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor
    ) -> PackedWeight:
        """Pack weights of 4 bits, for bfloat16 activations.

        Parameters
        ----------
        words, scales, zeros
            [columns, depth / 8] int32, [columns, groups] and [columns, groups] uint8, as `pack_numbers` takes them.

        Raises
        ------
        ValueError
            The size of a group is not one of `GROUP_SIZES` nor the depth, or there is no compiled library.
        """
        columns, depth = len(words), words.shape[1] * 8
        group_size = depth // scales.shape[1]
        if group_size * scales.shape[1] != depth or group_size not in (*GROUP_SIZES, depth):
            raise ValueError(
                f"scales: groups must have {GROUP_SIZES} or all of {depth} input features, got "
                f"{scales.shape[1]} groups"
            )
        if not supports(depth, torch.bfloat16, words.device):
            raise ValueError(f"words: need the CPU and the compiled library, are on {words.device}")
        packed, groups = pack_numbers(words, scales, zeros)
        return cls(packed, columns, depth, torch.bfloat16, in_strips=False, groups=groups)

    @classmethod
    def from_codes(cls, codes: torch.Tensor, scales: torch.Tensor) -> PackedWeight:
        """Pack int8 weights that are already quantised, for bfloat16 activations.

        Parameters
        ----------
        codes
            [columns, depth] int8; `depth` is a multiple of 4.
        scales
            [columns] float32: the weight is codes * scales.
        """
        columns, depth = codes.shape
        if codes.dtype != torch.int8 or depth % 4 or scales.shape != (columns,):
            raise ValueError(
                f"codes: must be int8 with a multiple of 4 input features and one scale per row, got {codes.dtype} "
                f"{list(codes.shape)} and scales {list(scales.shape)}"
            )
        target = _Panels(columns, codes, int8=True, scale_size=depth)
        target.add_codes(codes, scales[:, None])
        return cls(target.data, columns, depth, torch.bfloat16, False, target.scales, depth)

    @property
    def num_bytes(self) -> int:
        """Bytes in memory, padding of the last panel included."""
        scale_bytes = 0 if self.scales is None else self.scales.nbytes
        group_bytes = 0 if self.groups is None else self.groups.num_bytes
        code_bytes = 0 if self.code is None else self.code.num_bytes
        return self.data.nbytes + scale_bytes + group_bytes + code_bytes

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Look up rows of the weight, as an embedding does: [*ids.shape, depth] in `dtype`.

        Raises
        ------
        IndexError
            An id is not between 0 and columns - 1.
        """
        if self.groups is not None:
            return self.unpack()[ids]
        ids = ids.to(torch.int64).contiguous()
        stored = self.dtype if self.scales is None else torch.int8
        out = torch.empty(*ids.shape, self.depth, dtype=stored)
        outside = native_library.installed().functions.quire_unpack_rows(
            self.data.data_ptr(),
            self.code and ctypes.byref(self.code.arrays),
            self.in_strips,
            self.data.shape[1],
            self.columns,
            ids.data_ptr(),
            ids.numel(),
            out.data_ptr(),
        )
        if outside:
            low, high = (int(end) for end in torch.aminmax(ids))
            raise IndexError(f"ids: must be between 0 and {self.columns - 1}, got {low} to {high}")
        if self.scales is None:
            return out
        scales = self.scales[ids // PANEL_COLUMNS, :, ids % PANEL_COLUMNS]
        scaled = out * scales.repeat_interleave(self.scale_size, -1)[..., : self.depth]
        # As the library rounds: ties away from zero.
        return (scaled.view(torch.int32) + 0x8000 >> 16).to(torch.int16).view(self.dtype)

    def unpack(self) -> torch.Tensor:
        """Return the weight [columns, depth] in `dtype`: as it was packed, or the dequantised weights."""
        if self.groups is not None:
            return unpack_numbers(self.data, self.groups, self.columns).to(self.dtype)
        return self.rows(torch.arange(self.columns))

    def pad_bias(self, bias: torch.Tensor) -> torch.Tensor:
        """Convert a bias [columns] for `packed_linear`: float32, padded with zeros to the end of the last panel."""
        padded = torch.zeros(self.data.shape[0] * PANEL_COLUMNS)
        padded[: self.columns] = bias
        return padded


def _check_weight(like: torch.Tensor, int8: bool) -> None:
    depth = like.shape[1]
    if not supports(depth, like.dtype, like.device):
        raise ValueError(
            f"weight: must be {LIMITS}, on the CPU, with the compiled library; got {list(like.shape)} "
            f"{like.dtype} on {like.device}"
        )
    if int8 and (like.dtype != torch.bfloat16 or depth % 4):
        raise ValueError(
            f"int8: needs torch.bfloat16 and a multiple of 4 input features, got {like.dtype} and {depth}"
        )


def _in_strips(dtype: torch.dtype) -> bool:
    """Whether GEMMs in `dtype` use AMX on this processor; the AMX kernel reads panels in strips."""
    best = native_library.ISAS[native_library.installed().best_isa]
    return best == "amx_bf16" and dtype == torch.bfloat16


def _aligned(rows: torch.Tensor) -> torch.Tensor:
    """Return rows as the library reads them: contiguous and 4-byte aligned."""
    if rows.stride(1) != 1 or rows.stride(0) * rows.element_size() % 4:
        return rows.contiguous()
    return rows


class _Panels:
    """Packs a weight that arrives in parts and is not coded."""

    def __init__(self, columns: int, like: torch.Tensor, int8: bool, scale_size: int = SCALE_SIZE):
        depth = like.shape[1]
        words = depth // 4 if int8 else depth * like.element_size() // 4
        panels = -(-columns // PANEL_COLUMNS)
        self.data = torch.empty(panels, words, PANEL_COLUMNS, dtype=torch.int32)
        ask_for_huge_pages(self.data)
        if columns % PANEL_COLUMNS:
            self.data[-1].zero_()
        self.scale_size = scale_size if int8 else 0
        self.scales = torch.zeros(panels, -(-depth // scale_size), PANEL_COLUMNS) if int8 else None
        self.in_strips = _in_strips(like.dtype) and not int8
        self._done = 0

    def add(self, rows: torch.Tensor) -> None:
        """Pack the next columns."""
        if self.scales is not None:
            self.add_codes(*_quantized(rows))
            return
        pack_rows(self.data, rows, self._done, self.in_strips)
        self._done += len(rows)

    def add_codes(self, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """Pack the next columns of an int8 weight: [columns, depth] int8 and [columns, groups] float32."""
        assert self.scales is not None
        pack_rows(self.data, _aligned(codes), self._done, self.in_strips)
        ids = torch.arange(self._done, self._done + len(codes))
        self.scales[ids // PANEL_COLUMNS, :, ids % PANEL_COLUMNS] = scales
        self._done += len(codes)


def _quantized(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a bfloat16 weight [columns, depth]: the same shape in int8, and scales [columns, groups] float32."""
    depth = rows.shape[1]
    groups = torch.nn.functional.pad(rows.float(), (0, -depth % SCALE_SIZE))
    groups = groups.unflatten(1, (-1, SCALE_SIZE))
    scales = groups.abs().amax(dim=2) / 127.0
    # A group of zeros has the scale 0; the clamp avoids a division by zero.
    codes = (groups / scales.clamp_min(1e-30)[..., None]).round_().to(torch.int8)
    return codes.flatten(1)[:, :depth], scales


def packed_linear(
    x: torch.Tensor,
    weight: PackedWeight,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    isa: str | None = None,
) -> torch.Tensor:
    """Compute x @ weight.T (+ bias) (+ residual), accumulated in float32 and rounded once.

    Parameters
    ----------
    x
        [rows, depth] in the weight's dtype, rows contiguous.
    weight
        The packed weight [columns, depth].
    bias
        `weight.pad_bias` of the layer's bias.
    residual
        [rows, columns] in the dtype of x, rows contiguous.
    out
        [rows, columns] in the dtype of x, rows contiguous; None allocates it. It may be `residual` but not x.
    isa
        One of `native_library.ISAS` that this processor has, for tests and measurements; None: the best.

    Returns
    -------
    `out`.

    Raises
    ------
    ValueError
        A shape, dtype or stride is not supported, or this processor lacks `isa`.
    """
    rows = x.shape[0]
    shape = (rows, weight.columns)
    out = torch.empty(shape, dtype=x.dtype) if out is None else out
    for name, tensor, expected in (
        ("x", x, (rows, weight.depth)),
        ("out", out, shape),
        ("residual", residual, shape),
    ):
        if tensor is not None and (
            tensor.shape != expected or tensor.dtype != weight.dtype or tensor.stride(1) != 1
        ):
            raise ValueError(
                f"{name}: must be {list(expected)} {weight.dtype} with contiguous rows, got "
                f"{list(tensor.shape)} {tensor.dtype}, strides {tensor.stride()}"
            )
    call = LinearCall.of(weight, bias)
    if not rows:
        return out
    library = native_library.installed()
    size = x.element_size()
    call.x, call.x_stride = x.data_ptr(), x.stride(0) * size
    call.out, call.out_stride = out.data_ptr(), out.stride(0) * size
    if residual is not None:
        call.residual, call.residual_stride = residual.data_ptr(), residual.stride(0) * size
    call.rows = rows
    library.functions.quire_linear(
        ctypes.byref(call), library.isa(isa), library.parallel, torch.get_num_threads()
    )
    return out
