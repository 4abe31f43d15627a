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
from dataclasses import dataclass
from typing import Any

from torch import nn

from quire.replica.checkpoint.model_spec import CheckpointError
from quire.replica.model.sharded.rank_group import RankGroup
from quire.replica.model.sharded.shared_layers import (
    GatheredLinear,
    SummedExperts,
    SummedLinear,
    rows_of_rank,
)
from quire.replica.model.weights import StoredTensor

_ROWS = "colwise"
_GATHERED_ROWS = "colwise_gather_output"
_SUMS = {"rowwise": False, "rowwise_split_input": True}  # whether the input has all features
_EXPERTS = "moe_tp_experts"
# The module is on every rank, or `_EXPERTS` divides its tensor.
_WHOLE = {"replicated_with_grad_allreduce", "embedding_rowwise", "packed_colwise"}
# Of `torch.nn.functional.grouped_mm`.
_EXPERT_ROW_BYTES = 16
_EXPERT = re.compile(r"(.+)\.(\d+)\.(gate|up|down)_proj\.weight")


class TpPlan:
    """The tensor-parallel plan of a configuration.

    Raises
    ------
    CheckpointError
        There is none, or it has a style that is not known here.
    """

    def __init__(self, config: Any):
        entries: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or {}
        self._styles = [
            (re.compile(r"(?:.+\.)?" + re.escape(name).replace(r"\*", r"\d+")), style)
            for name, style in entries.items()
        ]
        styles = set(entries.values())
        if styles <= _WHOLE:
            raise CheckpointError(
                f"tensor_parallel: transformers has no tensor-parallel plan for model_type {config.model_type!r}"
            )
        if unknown := styles - {_ROWS, _GATHERED_ROWS, *_SUMS, _EXPERTS, *_WHOLE}:
            raise CheckpointError(
                f"tensor_parallel: the plan of model_type {config.model_type!r} has {sorted(unknown)[0]!r}, which is "
                "not served"
            )

    def style(self, path: str) -> str | None:
        """Return how the module or tensor at a path is divided; None: it is not."""
        return next((style for name, style in self._styles if name.fullmatch(path)), None)

    @property
    def splits_heads(self) -> bool:
        """Whether a rank computes attention for its own heads, not for all."""
        return self.style("layers.0.self_attn.q_proj") == _ROWS


def shard(
    model: nn.Module,
    stored: Mapping[str, StoredTensor],
    config: Any,
    head_dims: Mapping[int, tuple[int, int]],
    group: RankGroup,
    num_splits: int,
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

    Raises
    ------
    CheckpointError
        A size cannot be divided, or a tensor is stored in a form that cannot be read in parts.
    """
    sharding = _Sharding(model, dict(stored), TpPlan(config), head_dims, group, num_splits)
    sharding.run()
    return sharding.stored


@dataclass(slots=True)
class _Sharding:
    model: nn.Module
    stored: dict[str, StoredTensor]
    plan: TpPlan
    head_dims: Mapping[int, tuple[int, int]]
    group: RankGroup
    num_splits: int

    def run(self) -> None:
        for path, module in list(self.model.named_modules()):
            style = self.plan.style(path)
            if style == _EXPERTS:
                self._put(path, self._experts(path, module))
            elif style is not None and style not in _WHOLE and type(module) is not nn.Linear:
                raise CheckpointError(
                    f"tensor_parallel: {path} is a {type(module).__name__}, which is not divided"
                )
            elif style in _SUMS:
                self._put(path, self._summed(path, module, _SUMS[style]))
            elif style == _ROWS and self.group.size > 1:
                self._put(path, self._own_rows(path, module))
            elif style == _GATHERED_ROWS:
                self._put(path, self._gathered(path, module))
        # With one rank too, so that modules are fused alike for any number of ranks.
        self._share_head()

    def _put(self, path: str, module: nn.Module) -> None:
        parent, _, name = path.rpartition(".")
        setattr(self.model.get_submodule(parent), name, module)

    def _own_rows(self, path: str, linear: nn.Linear) -> nn.Linear:
        begin, end = self._range_of_rows(path, linear)
        self._cut_rows(path, path, begin, end)
        has_bias = linear.bias is not None
        return nn.Linear(
            linear.in_features, end - begin, has_bias, device="meta", dtype=linear.weight.dtype
        )

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
        whole = self.stored.pop(f"{path}.weight", None)
        for i, name in enumerate(f"{path}.parts.{i}.weight" for i in range(len(layer.parts))):
            if whole is not None:
                begin = self.group.rank * layer.in_features + i * width
                self.stored[name] = whole.columns(name, begin, begin + width)
        return layer

    def _gathered(self, path: str, linear: nn.Linear, to_first: bool = False) -> GatheredLinear:
        self._cut_rows(path, f"{path}.part", *rows_of_rank(linear.out_features, self.group))
        return GatheredLinear(linear, self.group, to_first)

    def _experts(self, path: str, experts: nn.Module) -> SummedExperts:
        names = {name for name, _ in experts.named_parameters()}
        inner = experts.down_proj.shape[-1]
        if names != {"gate_up_proj", "down_proj"} or experts.gate_up_proj.shape[1] != 2 * inner:
            raise CheckpointError(
                f"tensor_parallel: {path} ({type(experts).__name__}) has tensors that are not divided"
            )
        self._check(path, "inner features", inner, self.num_splits)
        row_bytes = inner // self.num_splits * experts.down_proj.element_size()
        if row_bytes % _EXPERT_ROW_BYTES:
            raise CheckpointError(
                f"tensor_parallel: a part of {path} would have rows of {row_bytes} bytes, which must be a multiple of "
                f"{_EXPERT_ROW_BYTES}"
            )
        layer = SummedExperts(experts, self.group, self.num_splits)
        width = inner // self.num_splits
        for name, tensor in list(self.stored.items()):
            if not name.startswith(f"{path}."):
                continue
            match = _EXPERT.fullmatch(name)
            if match is None or match[1] != path:
                raise CheckpointError(
                    f"{tensor.file}: {name!r} holds all experts, and tensor_parallel reads only experts that are "
                    "stored apart"
                )
            del self.stored[name]
            for i in range(len(layer.parts)):
                begin = (self.group.rank * len(layer.parts) + i) * width
                own = f"{path}.parts.{i}.{match[2]}.{match[3]}_proj.weight"
                cut = tensor.columns if match[3] == "down" else tensor.rows
                self.stored[own] = cut(own, begin, begin + width)
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
        if other is not None and self.stored:
            found = self.stored.get(name) or self.stored.get(other)
            if found is not None:
                self.stored[name] = found.named(name)
                self.stored[other] = found.named(other)
        self.model.all_tied_weights_keys = {
            key: value for key, value in tied.items() if name not in (key, value)
        }
        self._put(path, self._gathered(path, head, to_first=True))

    def _cut_rows(self, path: str, own_path: str, begin: int, end: int) -> None:
        for leaf in ("weight", "bias"):
            tensor = self.stored.pop(f"{path}.{leaf}", None)
            if tensor is not None:
                name = f"{own_path}.{leaf}"
                self.stored[name] = tensor.rows(name, begin, end)

    def _check(self, path: str, what: str, number: int, divisor: int) -> None:
        if number % divisor:
            raise CheckpointError(
                f"tensor_parallel: the {number} {what} of {path} cannot be divided into {divisor} equal parts"
            )
