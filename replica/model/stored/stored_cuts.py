"""The parts of stored tensors that a rank reads.

```
 weight [n, k]                 rows, or columns
 scales of 8 bits   [n, 1]     the same rows; all if columns are cut
                    [1]        all
                    [n / 128, k / 128]   the blocks of the rows or columns, which must begin where a block does
```
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from quire.replica.checkpoint.model_spec import CheckpointError
from quire.replica.model.stored.stacked_form import Columns
from quire.replica.model.stored.weights import StoredTensor

_WEIGHT = "weight"
_SCALES = ("weight_scale", "weight_scale_inv")
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
    """

    stored: dict[str, StoredTensor]
    block: Range | None = None

    def cut(self, path: str, parts: Sequence[Part]) -> None:
        """Replace the tensors of a linear layer by those of its parts; a bias is cut with the rows.

        Raises
        ------
        CheckpointError
            A part begins or ends within a block with one scale.
        """
        weight = self.stored.pop(f"{path}.{_WEIGHT}", None)
        bias = self.stored.pop(f"{path}.bias", None) if parts[0].rows is not None else None
        if weight is None:
            return
        scales = {leaf: self.stored.pop(f"{path}.{leaf}", None) for leaf in _SCALES}
        for part in parts:
            self._put(weight, f"{part.path}.{_WEIGHT}", part.rows, part.columns)
            if bias is not None:
                self._put(bias, f"{part.path}.bias", part.rows, None)
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

    def _blocks(self, scales: StoredTensor, cut: Range, per: int, size: int) -> Range:
        begin, end = cut
        if begin % per or (end % per and end != size):
            raise CheckpointError(
                f"{scales.file}: tensor_parallel: {scales.name!r} has a scale for {per} rows or columns, and a part of "
                f"the weight would have those from {begin} to {end}"
            )
        return begin // per, -(-end // per)
