"""How the stacked matrices of a mixture's experts are cut: inner features [begin, end) of every expert.

Each tensor is read as a matrix with more rows, in which the part of a rank is a range of columns:

```
 gate_up_proj [E, 2 * inner, hidden]   as [2 E, inner * hidden]      gates of an expert, then its ups
 down_proj    [E, hidden, inner]       as [E * hidden, inner]

 gpt-oss: gates and ups alternate, and matrices are transposed
 gate_up_proj [E, hidden, 2 * inner]   as [E * hidden, 2 * inner]
 down_proj    [E, inner, hidden]       as [E, inner * hidden]
 ... _blocks, _scales of MXFP4         see `weight_scheme.py`
```
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from quire.replica.checkpoint.model_spec import CheckpointError

_GROUP = 32  # numbers of MXFP4 with one scale, in 16 bytes
Cut = tuple[int, int]


class Columns(NamedTuple):
    """A part of a tensor: the range of columns of a matrix with `num_rows` rows, and the shape of the result."""

    num_rows: int
    columns: Cut
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StackedForm:
    """Sizes and order of a mixture's stacked tensors."""

    num_experts: int
    hidden: int
    inner: int
    is_transposed: bool  # as gpt-oss

    @classmethod
    def of(cls, experts: nn.Module) -> StackedForm | None:
        """Return the form of transformers' module; None: it is not known."""
        names = {name for name, _ in experts.named_parameters()}
        matrices = {"gate_up_proj", "down_proj"}
        if not matrices <= names:
            return None
        num_experts, second, third = experts.down_proj.shape
        gate_up = tuple(experts.gate_up_proj.shape)
        if names == matrices and gate_up == (num_experts, 2 * third, second):
            return cls(num_experts, second, third, is_transposed=False)
        # A class with other names of its own could have another order.
        is_alike = type(experts).__name__ == "GptOssExperts"
        if is_alike and gate_up == (num_experts, third, 2 * second):
            return cls(num_experts, third, second, is_transposed=True)
        return None

    def parameters(self, width: int) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of a part with `width` inner features, by the name of the parameter."""
        names = ["gate_up_proj", "down_proj"]
        if self.is_transposed:
            names += [f"{name}_bias" for name in names]
        return {name: self.matrices[name]((0, width)).shape for name in names}

    @property
    def matrices(self) -> Mapping[str, Callable[[Cut], Columns]]:
        """Which part of a stored tensor has the inner features of a cut, by the name of the tensor."""
        experts, hidden = self.num_experts, self.hidden
        if not self.is_transposed:
            return {
                "gate_up_proj": lambda cut: Columns(
                    2 * experts, _times(cut, hidden), (experts, 2 * _width(cut), hidden)
                ),
                "down_proj": lambda cut: Columns(
                    experts * hidden, cut, (experts, hidden, _width(cut))
                ),
            }
        groups = hidden // _GROUP
        return {
            "gate_up_proj": lambda cut: Columns(
                experts * hidden, _times(cut, 2), (experts, hidden, 2 * _width(cut))
            ),
            "gate_up_proj_bias": lambda cut: Columns(
                experts, _times(cut, 2), (experts, 2 * _width(cut))
            ),
            "down_proj": lambda cut: Columns(
                experts, _times(cut, hidden), (experts, _width(cut), hidden)
            ),
            "down_proj_bias": lambda cut: Columns(experts, (0, hidden), (experts, hidden)),
            "gate_up_proj_blocks": lambda cut: Columns(
                experts,
                _times(cut, groups * _GROUP),
                (experts, 2 * _width(cut), groups, _GROUP // 2),
            ),
            "gate_up_proj_scales": lambda cut: Columns(
                experts, _times(cut, 2 * groups), (experts, 2 * _width(cut), groups)
            ),
            "down_proj_blocks": lambda cut: Columns(
                experts * hidden,
                _times(_groups(cut), _GROUP // 2),
                (experts, hidden, _width(_groups(cut)), _GROUP // 2),
            ),
            "down_proj_scales": lambda cut: Columns(
                experts * hidden, _groups(cut), (experts, hidden, _width(_groups(cut)))
            ),
        }


def _width(cut: Cut) -> int:
    return cut[1] - cut[0]


def _times(cut: Cut, factor: int) -> Cut:
    return cut[0] * factor, cut[1] * factor


def _groups(cut: Cut) -> Cut:
    if cut[0] % _GROUP or cut[1] % _GROUP:
        raise CheckpointError(
            f"tensor_parallel: MXFP4 has a scale for {_GROUP} numbers, and a part of the experts would have those from "
            f"{cut[0]} to {cut[1]}"
        )
    return cut[0] // _GROUP, cut[1] // _GROUP
