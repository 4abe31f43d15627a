"""The parts of stored tensors that a rank reads.

```
 weight [n, k]                 rows, or columns
 scales of 8 bits   [n, 1]     the same rows; all if columns are cut
                    [1]        all
                    [n / 128, k / 128]   the blocks of the rows or columns, which must begin where a block does
 4 bits             see `w4_checkpoint.py`; words and groups are not cut
```
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from quire.replica.checkpoint.model_spec import CheckpointError
from quire.replica.model.stored.stacked_form import Columns
from quire.replica.model.stored.weights import StoredTensor

_WEIGHT = "weight"
_SCALES = ("weight_scale", "weight_scale_inv")
# Of a layer in 4 bits, by format: what the two axes of each tensor are (rows n or columns k of the weight), and how
# many rows or columns an entry has; 0: a group of columns with one scale.
_W4_AXES: Mapping[str, Mapping[str, tuple[tuple[str, int], ...]]] = {
    "gptq": {
        "qweight": (("k", 8), ("n", 1)),
        "qzeros": (("k", 0), ("n", 8)),
        "scales": (("k", 0), ("n", 1)),
        "g_idx": (("k", 1),),
    },
    "awq": {
        "qweight": (("k", 1), ("n", 8)),
        "qzeros": (("k", 0), ("n", 8)),
        "scales": (("k", 0), ("n", 1)),
    },
    "compressed-tensors": {
        "weight_packed": (("n", 1), ("k", 8)),
        "weight_zero_point": (("n", 8), ("k", 0)),
        "weight_scale": (("n", 1), ("k", 0)),
        "weight_g_idx": (("k", 1),),
        "weight_shape": (),
    },
}
Range = tuple[int, int]


class Part(NamedTuple):
    """A part of a linear layer: of its rows or of its columns."""

    path: str  # of the module that gets it
    rows: Range | None = None
    columns: Range | None = None


@dataclass(slots=True)
class StoredCuts:
    """The stored tensors of a rank, by the names of its model.

    Parameters
    ----------
    stored
        The checkpoint's; {} to see only the model's sizes.
    block
        Rows and columns with one scale, of weights in 8 bits; None: a row or all.
    w4
        The format of layers in 4 bits; None: there are none.
    """

    stored: dict[str, StoredTensor]
    block: Range | None = None
    w4: str | None = None

    def cut(self, path: str, parts: Sequence[Part], num_columns: int = 0) -> None:
        """Replace the tensors of a linear layer by those of its parts; a bias is cut with the rows.

        Parameters
        ----------
        num_columns
            Input features of the layer, for weights in 4 bits.

        Raises
        ------
        CheckpointError
            A part begins or ends within a block, a word or a group with one scale.
        """
        weight = self.stored.pop(f"{path}.{_WEIGHT}", None)
        bias = self.stored.pop(f"{path}.bias", None) if parts[0].rows is not None else None
        if weight is None and self.w4 is not None:
            self._cut_w4(path, parts, num_columns, _W4_AXES[self.w4])
        if bias is not None:
            for part in parts:
                self._put(bias, f"{part.path}.bias", part.rows, None)
        if weight is None:
            return
        scales = {leaf: self.stored.pop(f"{path}.{leaf}", None) for leaf in _SCALES}
        for part in parts:
            self._put(weight, f"{part.path}.{_WEIGHT}", part.rows, part.columns)
            for leaf, tensor in scales.items():
                if tensor is not None:
                    self._put_scales(tensor, f"{part.path}.{leaf}", weight, part)

    def cut_stacked(self, name: str, own_name: str, part: Columns) -> None:
        """Add a part of a tensor that all experts of a mixture share."""
        cut = self.stored[name].as_matrix(part.num_rows).columns(own_name, *part.columns)
        self.stored[own_name] = replace(cut, shape=part.shape)

    def cut_rows(self, name: str, rows: Range) -> None:
        """Replace a tensor by some of its rows."""
        if name in self.stored:
            self._put(self.stored[name], name, rows, None)

    def _put(
        self, tensor: StoredTensor, name: str, rows: Range | None, columns: Range | None
    ) -> None:
        if rows is not None:
            tensor = tensor.rows(name, *rows)
        elif columns is not None:
            tensor = tensor.columns(name, *columns)
        self.stored[name] = tensor.named(name)

    def _put_scales(
        self, scales: StoredTensor, name: str, weight: StoredTensor, part: Part
    ) -> None:
        num_rows, num_columns = weight.shape
        rows, columns = part.rows, part.columns
        if self.block is not None and scales.shape == tuple(
            -(-size // per) for size, per in zip(weight.shape, self.block, strict=True)
        ):
            height, width = self.block
            rows = rows and self._blocks(scales, rows, height, num_rows)
            columns = columns and self._blocks(scales, columns, width, num_columns)
        elif scales.shape[:1] != (num_rows,):
            rows = columns = None  # one scale for all
        else:
            columns = None
        self._put(scales, name, rows, columns)

    def _cut_w4(
        self,
        path: str,
        parts: Sequence[Part],
        num_columns: int,
        axes: Mapping[str, tuple[tuple[str, int], ...]],
    ) -> None:
        for leaf, of_leaf in axes.items():
            tensor = self.stored.pop(f"{path}.{leaf}", None)
            if tensor is None:
                continue
            for part in parts:
                axis, cut = ("n", part.rows) if part.rows is not None else ("k", part.columns)
                assert cut is not None
                sides: dict[str, Range] = {}
                for side, ((name, unit), size) in zip(
                    ("rows", "columns"), zip(of_leaf, tensor.shape, strict=False), strict=False
                ):
                    # One group has all columns.
                    if name == axis and (unit or size > 1):
                        sides[side] = self._entries(tensor, cut, unit or num_columns // size)
                self._put(tensor, f"{part.path}.{leaf}", sides.get("rows"), sides.get("columns"))

    def _entries(self, tensor: StoredTensor, cut: Range, unit: int) -> Range:
        if cut[0] % unit or cut[1] % unit:
            raise CheckpointError(
                f"{tensor.file}: tensor_parallel: an entry of {tensor.name!r} is for {unit} rows or columns, and a "
                f"part of the weight would have those from {cut[0]} to {cut[1]}"
            )
        return cut[0] // unit, cut[1] // unit

    def _blocks(self, scales: StoredTensor, cut: Range, per: int, size: int) -> Range:
        begin, end = cut
        if begin % per or (end % per and end != size):
            raise CheckpointError(
                f"{scales.file}: tensor_parallel: {scales.name!r} has a scale for {per} rows or columns, and a part of "
                f"the weight would have those from {begin} to {end}"
            )
        return begin // per, -(-end // per)
