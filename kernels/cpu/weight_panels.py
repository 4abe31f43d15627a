"""Packs a weight into panels of 64 output features, which a GEMM reads front to back (`native/linear_unit.h`)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import torch

from quire.kernels.cpu import native_library
from quire.kernels.huge_pages import ask_for_huge_pages

PANEL_COLUMNS = 64  # `PANEL_COLUMNS` of native/linear.h


class PackCall(ctypes.Structure):
    """`struct pack_call` of native/linear.c."""

    _fields_ = [
        ("packed", ctypes.c_void_p),
        ("in_strips", ctypes.c_int64),
        ("rows", ctypes.c_void_p),
        ("row_stride", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("steps", ctypes.c_int64),
        ("first_column", ctypes.c_int64),
        ("next_panel", ctypes.c_int64),
    ]


class GroupArrays(ctypes.Structure):
    """`struct weight_groups` of native/linear_groups.h."""

    _fields_ = [
        ("scales", ctypes.c_void_p),
        ("zeros", ctypes.c_void_p),
        ("group_steps", ctypes.c_int64),
    ]


@dataclass(frozen=True, slots=True)
class WeightGroups:
    """Scales and zero points of 4-bit weights in panels."""

    scales: torch.Tensor  # [panels, groups, 64] float32
    zeros: torch.Tensor  # [panels, groups, 128] int8, in the order of `_code_order`
    arrays: GroupArrays = field(compare=False, repr=False)  # addresses of the tensors above

    @classmethod
    def of(cls, scales: torch.Tensor, zeros: torch.Tensor, group_size: int) -> WeightGroups:
        """Make the groups of `group_size` input features from the tensors in panels."""
        return cls(scales, zeros, GroupArrays(scales.data_ptr(), zeros.data_ptr(), group_size // 2))

    @property
    def num_bytes(self) -> int:
        """Bytes of scales and zero points."""
        return self.scales.nbytes + self.zeros.nbytes


def pack_numbers(
    words: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor
) -> tuple[torch.Tensor, WeightGroups]:
    """Pack 4-bit weights in panels.

    Parameters
    ----------
    words
        [columns, depth / 8] int32; number i of a word has the bits 4 i to 4 i + 3.
    scales
        [columns, groups] of any float dtype.
    zeros
        [columns, groups] uint8, 0 to 15.

    Returns
    -------
    [panels, depth / 2, 16] int32, and the groups.
    """
    columns, groups = scales.shape
    depth = words.shape[1] * 8
    panels = -(-columns // PANEL_COLUMNS)
    packed = torch.zeros(panels, depth // 2, PANEL_COLUMNS // 4, dtype=torch.int32)
    ask_for_huge_pages(packed)
    all_scales = torch.zeros(panels, groups, PANEL_COLUMNS)
    all_zeros = torch.zeros(panels, groups, 2 * PANEL_COLUMNS, dtype=torch.int8)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    for panel in range(panels):
        rows = slice(panel * PANEL_COLUMNS, (panel + 1) * PANEL_COLUMNS)
        numbers = (words[rows, :, None] >> shifts & 15).to(torch.uint8).flatten(1)
        count = len(numbers)
        if count < PANEL_COLUMNS:
            numbers = torch.cat([numbers, numbers.new_zeros(PANEL_COLUMNS - count, depth)])
        lower, upper = _code_order(numbers.view(PANEL_COLUMNS, depth // 2, 2)).chunk(2, dim=1)
        packed[panel].view(torch.uint8).copy_(lower | upper << 4)
        all_scales[panel, :, :count] = scales[rows].float().t()
        group_zeros = zeros.new_zeros(PANEL_COLUMNS, groups)
        group_zeros[:count] = zeros[rows]
        all_zeros[panel] = _code_order(group_zeros[..., None].expand(-1, -1, 2))
    return packed, WeightGroups.of(all_scales, all_zeros, depth // groups)


def _code_order(pairs: torch.Tensor) -> torch.Tensor:
    """Bring pairs [64 columns, steps, 2] to the order of `code_place` (native/linear_code.h): [steps, 128]."""
    by_vector = pairs.permute(1, 0, 2).reshape(pairs.shape[1], 2, 2, 4, 8)
    return by_vector.permute(0, 1, 3, 2, 4).reshape(pairs.shape[1], 2 * PANEL_COLUMNS)


def unpack_numbers(packed: torch.Tensor, groups: WeightGroups, columns: int) -> torch.Tensor:
    """Return number minus zero point, times scale, of weights in panels: [columns, depth] float32."""
    both = packed.view(torch.uint8)  # [panels, steps, 64]
    codes = torch.cat([both & 15, both >> 4], dim=2).to(torch.int8)
    size = codes.shape[1] // groups.zeros.shape[1]
    codes -= groups.zeros.repeat_interleave(size, dim=1)
    by_place = codes.unflatten(2, (2, 4, 2, 8)).transpose(3, 4).reshape(*codes.shape[:2], 64, 2)
    values = by_place * groups.scales.repeat_interleave(size, dim=1)[..., None]
    return values.permute(0, 2, 1, 3).reshape(-1, 2 * codes.shape[1])[:columns]


def pack_rows(packed: torch.Tensor, rows: torch.Tensor, first_column: int, in_strips: bool) -> None:
    """Write rows of a weight into its panels.

    Parameters
    ----------
    packed
        [panels, steps, 64] int32, all panels of the weight.
    rows
        [columns, depth], rows contiguous and 4-byte aligned, `steps` words of 32 bits each.
    first_column
        Index of the first of `rows` in the packed weight, where it becomes a column.
    in_strips
        Whether a panel is [4, steps, 16] words, the layout for AMX.
    """
    library = native_library.installed()
    call = PackCall(
        packed=packed.data_ptr(),
        in_strips=in_strips,
        rows=rows.data_ptr(),
        row_stride=rows.stride(0) * rows.element_size(),
        columns=len(rows),
        steps=packed.shape[1],
        first_column=first_column,
    )
    library.functions.quire_pack(ctypes.byref(call), library.parallel, torch.get_num_threads())
