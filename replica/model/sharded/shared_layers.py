"""Layers whose weights are divided among ranks. `shard_plan.py` puts them in the place of transformers' modules.

```
 plan                    weight [out, in]      input       output
 colwise                 rows of this rank     whole       this rank's features     an ordinary linear layer
 rowwise                 columns               its own     sum over ranks           SummedLinear
 rowwise_split_input     columns               whole       sum over ranks           SummedLinear
 colwise_gather_output   rows                  whole       whole                    GatheredLinear
 output head             rows                  whole       whole, on rank 0 only    GatheredLinear
 experts                 both                  whole       sum over ranks           SummedExperts
```

A rank's columns are cut into the parts whose sums are added in the order of `rank_group.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from quire.replica.model.sharded.rank_group import RankGroup
from quire.replica.model.stored.stacked_form import StackedForm


@dataclass(frozen=True, slots=True)
class DividedSum:
    """A matrix product whose input features are divided among ranks and parts."""

    group: RankGroup
    part_features: int
    num_parts: int  # of this rank
    # Whether the input has the features of all ranks.
    takes_all: bool

    def __call__(self, products: Iterable[nn.Module], x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' products, one for each part, of x [..., features]."""
        if self.takes_all:
            width = self.part_features * self.num_parts
            x = x[..., self.group.rank * width : (self.group.rank + 1) * width]
        pieces = x.split(self.part_features, dim=-1)
        return self.group.sum([p(piece) for p, piece in zip(products, pieces, strict=True)])


class SummedLinear(nn.Module):
    """A linear layer whose input features are divided among ranks and parts.

    Parameters
    ----------
    linear
        The layer to replace, on the meta device.
    group
        The ranks.
    num_splits
        Parts of all ranks together.
    takes_all
        Whether the input has the features of all ranks.
    """

    def __init__(self, linear: nn.Linear, group: RankGroup, num_splits: int, takes_all: bool):
        super().__init__()
        features, num_parts = linear.in_features // num_splits, num_splits // group.size
        self.sums = DividedSum(group, features, num_parts, takes_all)
        self.in_features, self.out_features = features * num_parts, linear.out_features
        self.parts = nn.ModuleList(
            _empty_linear(linear, features, self.out_features, bias=False) for _ in range(num_parts)
        )
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features], or of all ranks, to [..., out_features]."""
        out = self.sums(self.parts, x)
        return out if self.bias is None else out + self.bias


class GatheredLinear(nn.Module):
    """A linear layer whose output features are divided among ranks, and gathered.

    Parameters
    ----------
    linear
        The layer to replace, on the meta device.
    to_first
        Whether only the first rank gets the result; the others get zeros of its shape.
    """

    def __init__(self, linear: nn.Linear, group: RankGroup, to_first: bool = False):
        super().__init__()
        self.group = group
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.to_first = to_first
        begin, end = rows_of_rank(self.out_features, group)
        self.part = _empty_linear(linear, linear.in_features, end - begin, linear.bias is not None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        own = self.part(x)
        widest = -(-self.out_features // self.group.size)
        if own.shape[-1] < widest:  # all ranks send the same number
            own = nn.functional.pad(own, (0, widest - own.shape[-1]))
        gathered = self.group.gather_to_first(own) if self.to_first else self.group.gather(own)
        if gathered is None:
            return own.new_zeros(*own.shape[:-1], self.out_features)
        return torch.cat(gathered, dim=-1)[..., : self.out_features]


class SummedExperts(nn.Module):
    """A mixture's experts, whose inner features are divided among ranks and parts.

    Parameters
    ----------
    experts
        transformers' module, on the meta device.
    form
        Its sizes.
    """

    def __init__(self, experts: nn.Module, form: StackedForm, group: RankGroup, num_splits: int):
        super().__init__()
        self.group = group
        self._num_splits = num_splits
        width = form.inner // num_splits
        self.parts = nn.ModuleList()
        for _ in range(num_splits // group.size):
            part = copy.deepcopy(experts)
            part.intermediate_dim = width
            for name, shape in form.parameters(width).items():
                empty = torch.empty(shape, dtype=experts.down_proj.dtype, device="meta")
                setattr(part, name, nn.Parameter(empty, requires_grad=False))
            self.parts.append(part)

    def share_bias(self) -> None:
        """Divide the bias of the sum, which every part has read; their number is a power of two, so this is exact."""
        for part in self.parts:
            if (bias := getattr(part, "down_proj_bias", None)) is not None:
                bias.div_(self._num_splits)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden], ids and weights [tokens, top_k] to [tokens, hidden]."""
        return self.group.sum([part(x, ids, weights) for part in self.parts])


def rows_of_rank(num_rows: int, group: RankGroup) -> tuple[int, int]:
    """Return the range of rows that a rank has; the last ranks may have fewer."""
    each = -(-num_rows // group.size)
    return min(group.rank * each, num_rows), min((group.rank + 1) * each, num_rows)


def share_biases(model: nn.Module) -> None:
    """Divide the biases of sums that every part has read, after the weights are loaded."""
    for module in model.modules():
        if isinstance(module, SummedExperts):
            module.share_bias()


def group_of(model: nn.Module) -> RankGroup | None:
    """Return the ranks that compute a model together; None if one computes it alone."""
    for module in model.modules():
        if isinstance(module, SummedLinear) and module.sums.group.size > 1:
            return module.sums.group
        if isinstance(module, GatheredLinear):
            return module.group
    return None


def _empty_linear(like: nn.Linear, in_features: int, out_features: int, bias: bool) -> nn.Linear:
    return nn.Linear(in_features, out_features, bias, device="meta", dtype=like.weight.dtype)
