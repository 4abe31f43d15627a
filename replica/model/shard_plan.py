"""Divides a model among ranks as transformers' tensor-parallel plan of its class says.

The plan (`base_model_tp_plan`) names modules and the side on which each is divided. Here the modules of the empty model
are replaced by this rank's, and stored tensors by the parts that this rank reads. Norms, embeddings and routers are on
every rank.

Heads of attention stay whole. If there are fewer KV heads than ranks, several ranks have the same one:

```
 rank 0   q0 q1   kv0        8 query heads and 2 KV heads on 4 ranks
 rank 1   q2 q3   kv0
 rank 2   q4 q5   kv1
 rank 3   q6 q7   kv1
```
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from quire.replica.checkpoint.model_spec import CheckpointError
from quire.replica.model.layers.linear_parts import WholeLayer
from quire.replica.model.sharded.rank_group import RankGroup
from quire.replica.model.sharded.shared_layers import (
    GatheredLinear,
    SummedExperts,
    SummedLinear,
    rows_of_rank,
)
from quire.replica.model.stored.stacked_form import StackedForm
from quire.replica.model.stored.stored_cuts import Part, StoredCuts
from quire.replica.model.stored.weights import StoredTensor
from quire.replica.model.tp_plan import (
    EXPERTS,
    GATHERED_ROWS,
    PARAMETERS,
    ROWS,
    SUMS,
    WHOLE,
    TpPlan,
)

# Of `torch.nn.functional.grouped_mm`.
_EXPERT_ROW_BYTES = 16
_EXPERT = re.compile(r"(.+)\.(\d+)\.(gate|up|down)_proj\.weight")


def shard(
    model: nn.Module,
    stored: Mapping[str, StoredTensor],
    config: Any,
    head_dims: Mapping[int, tuple[int, int]],
    group: RankGroup,
    num_splits: int,
    block: tuple[int, int] | None = None,
    w4: str | None = None,
) -> dict[str, StoredTensor]:
    """Replace modules of a model on the meta device by this rank's; return what is read for them.

    Parameters
    ----------
    stored
        Tensors of the checkpoint by the model's names; {} to see only the model's sizes.
    config
        Configuration of the text model.
    head_dims
        Elements of a key and of a value, by layer.
    num_splits
        Parts in which sums over input features are cut, of all ranks together; a multiple of their number.
    block
        Rows and columns with one scale, of weights in 8 bits; None: a row or all.
    w4
        The format of layers in 4 bits; None: there are none.

    Raises
    ------
    CheckpointError
        A size cannot be divided, or a tensor is stored in a form that cannot be read in parts.
    """
    _check_shapes(model, stored)
    cuts = StoredCuts(dict(stored), block, w4)
    sharding = _Sharding(model, cuts, TpPlan(config), head_dims, group, num_splits)
    sharding.run()
    model.whole_layers = sharding.wholes
    return cuts.stored


def _check_shapes(model: nn.Module, stored: Mapping[str, StoredTensor]) -> None:
    """Raise `CheckpointError` for a tensor that has another shape than the model's."""
    state = model.state_dict()
    for name, tensor in stored.items():
        if name in state and tensor.shape != state[name].shape:
            raise CheckpointError(
                f"{tensor.file}: {name!r} has shape {list(tensor.shape)}, expected {list(state[name].shape)}"
            )


@dataclass(slots=True)
class _Sharding:
    model: nn.Module
    cuts: StoredCuts
    plan: TpPlan
    head_dims: Mapping[int, tuple[int, int]]
    group: RankGroup
    num_splits: int
    wholes: dict[str, WholeLayer] = field(default_factory=dict)

    def run(self) -> None:
        for path, module in list(self.model.named_modules()):
            style = self.plan.style(path)
            if style == EXPERTS:
                self._put(path, self._experts(path, module))
            elif style == PARAMETERS:
                self._cut_parameters(path, module)
            elif style is not None and style not in WHOLE and type(module) is not nn.Linear:
                raise CheckpointError(
                    f"tensor_parallel: {path} is a {type(module).__name__}, which is not divided"
                )
            elif style in SUMS:
                self._put(path, self._summed(path, module, SUMS[style]))
            elif style == ROWS and self.group.size > 1:
                self._put(path, self._own_rows(path, module))
            elif style == GATHERED_ROWS:
                self._put(path, self._gathered(path, module))
        # With one rank too, so that modules are fused alike for any number of ranks.
        self._share_head()

    def _put(self, path: str, module: nn.Module) -> None:
        parent_path, _, name = path.rpartition(".")
        parent = self.model.get_submodule(parent_path)
        setattr(parent, name, module)
        if not parent._buffers:
            # Else some classes would initialise the weights of the module that was there.
            parent._is_hf_initialized = True

    def _cut_parameters(self, path: str, module: nn.Module) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            full = f"{path}.{name}"
            if self.plan.style(full) == ROWS and self.group.size > 1:
                self._check(full, "rows", len(parameter), self.group.size)
                each = len(parameter) // self.group.size
                begin = self.group.rank * each
                own = nn.Parameter(parameter.new_empty(each, *parameter.shape[1:]))
                setattr(module, name, own)
                self.cuts.cut_rows(full, (begin, begin + each))

    def _own_rows(self, path: str, linear: nn.Linear) -> nn.Linear:
        begin, end = self._range_of_rows(path, linear)
        part = Part(path, rows=(begin, end))
        self.cuts.cut(path, [part], linear.in_features)
        has_bias = linear.bias is not None
        own = nn.Linear(
            linear.in_features, end - begin, has_bias, device="meta", dtype=linear.weight.dtype
        )
        self._note(path, linear, part)
        return own

    def _range_of_rows(self, path: str, linear: nn.Linear) -> tuple[int, int]:
        size, rank = self.group.size, self.group.rank
        parent, _, name = path.rpartition(".")
        layer = getattr(self.model.get_submodule(parent), "layer_idx", None)
        if name in ("k_proj", "v_proj") and layer is not None and layer in self.head_dims:
            width = self.head_dims[layer][name == "v_proj"]
            num_heads = linear.out_features // width
            if num_heads < size:  # `rank_spec` has checked that it divides the number of ranks
                first = rank * num_heads // size
                return first * width, (first + 1) * width
        self._check(path, "output features", linear.out_features, size)
        each = linear.out_features // size
        return rank * each, (rank + 1) * each

    def _summed(self, path: str, linear: nn.Linear, takes_all: bool) -> SummedLinear:
        self._check(path, "input features", linear.in_features, self.num_splits)
        layer = SummedLinear(linear, self.group, self.num_splits, takes_all)
        width = linear.in_features // self.num_splits
        parts = []
        for i in range(len(layer.parts)):
            begin = self.group.rank * layer.in_features + i * width
            part = Part(f"{path}.parts.{i}", columns=(begin, begin + width))
            parts.append(part)
            self._note(path, linear, part)
        self.cuts.cut(path, parts, linear.in_features)
        return layer

    def _gathered(self, path: str, linear: nn.Linear, to_first: bool = False) -> GatheredLinear:
        begin, end = rows_of_rank(linear.out_features, self.group)
        part = Part(f"{path}.part", rows=(begin, end))
        self.cuts.cut(path, [part], linear.in_features)
        layer = GatheredLinear(linear, self.group, to_first)
        self._note(path, linear, part)
        return layer

    def _experts(self, path: str, experts: nn.Module) -> SummedExperts:
        form = StackedForm.of(experts)
        if form is None:
            raise CheckpointError(
                f"tensor_parallel: {path} ({type(experts).__name__}) has tensors that are not divided"
            )
        self._check(path, "inner features", form.inner, self.num_splits)
        width = form.inner // self.num_splits
        row_bytes = width * experts.down_proj.element_size()
        if row_bytes % _EXPERT_ROW_BYTES:
            raise CheckpointError(
                f"tensor_parallel: a part of {path} would have rows of {row_bytes} bytes, which must be a multiple of "
                f"{_EXPERT_ROW_BYTES}"
            )
        layer = SummedExperts(experts, form, self.group, self.num_splits)
        begins = [(self.group.rank * len(layer.parts) + i) * width for i in range(len(layer.parts))]
        for name in [name for name in self.cuts.stored if name.startswith(f"{path}.")]:
            expert, inside = _EXPERT.fullmatch(name), name.removeprefix(f"{path}.")
            owns = [
                (f"{path}.parts.{i}.{inside}", (begin, begin + width))
                for i, begin in enumerate(begins)
            ]
            if expert is not None:
                key = "columns" if expert[3] == "down" else "rows"
                parts = [Part(own.removesuffix(".weight"), **{key: cut}) for own, cut in owns]
                self.cuts.cut(name.removesuffix(".weight"), parts)
            elif (matrix_of := form.matrices.get(inside)) is not None:
                for own, cut in owns:
                    self.cuts.cut_stacked(name, own, matrix_of(cut))
                del self.cuts.stored[name]
        return layer

    def _share_head(self) -> None:
        """Divide the vocabulary. A head that is tied to the embedding gets its rows as a tensor of its own."""
        head = self.model.get_output_embeddings()
        path = next(path for path, module in self.model.named_modules() if module is head)
        if type(head) is not nn.Linear:
            raise CheckpointError(
                f"tensor_parallel: the output head is a {type(head).__name__}, which is not divided"
            )
        name, tied = f"{path}.weight", self.model.all_tied_weights_keys
        other = tied.get(name) or next((key for key, value in tied.items() if value == name), None)
        if other is not None and self.cuts.stored:
            found = self.cuts.stored.get(name) or self.cuts.stored.get(other)
            if found is not None:
                if found.shape != head.weight.shape:
                    raise CheckpointError(
                        f"{found.file}: {found.name!r} has shape {list(found.shape)}, and the output head that is tied "
                        f"to it {list(head.weight.shape)}"
                    )
                self.cuts.stored[name] = found.named(name)
                self.cuts.stored[other] = found.named(other)
        self.model.all_tied_weights_keys = {
            key: value for key, value in tied.items() if name not in (key, value)
        }
        self._put(path, self._gathered(path, head, to_first=True))

    def _note(self, path: str, whole: nn.Linear, part: Part) -> None:
        """Note of which layer a product is a part; adapters are cut alike."""
        sizes = (whole.in_features, whole.out_features)
        columns, rows = part.columns or (0, sizes[0]), part.rows or (0, sizes[1])
        self.wholes[part.path] = WholeLayer(path, *sizes, columns, rows)

    def _check(self, path: str, what: str, number: int, divisor: int) -> None:
        if number % divisor:
            raise CheckpointError(
                f"tensor_parallel: the {number} {what} of {path} cannot be divided into {divisor} equal parts"
            )
