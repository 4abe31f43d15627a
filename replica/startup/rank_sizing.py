"""Sizes of one rank of a tensor-parallel replica: its part of the checkpoint's shape and of the replica's memory."""

from __future__ import annotations

import dataclasses

from torch import nn

from quire.replica.checkpoint.model_spec import CheckpointError, ModelSpec
from quire.replica.config import EngineArgs
from quire.replica.kv_cache.groups import LayerKind
from quire.replica.model.loader import empty_model, shard_facts
from quire.replica.model.own_attention import has_own_attention
from quire.replica.model.shard_plan import shard
from quire.replica.model.sharded.rank_group import RankGroup
from quire.replica.model.tp_plan import TpPlan
from quire.replica.startup.sizing import choose_sizing


def rank_args(args: EngineArgs) -> EngineArgs:
    """Return a rank's share of the options. Ranks on a CPU share its memory; on GPUs each has one."""
    num_ranks, num_splits = args.tensor_parallel, args.num_splits
    if num_splits == 1:
        return args
    divided = ["kv_cache_gib", "node_pool_gib"]
    if choose_sizing(args.device, 1).device == "cpu":
        divided.append("max_memory_percent")
    shares = {
        name: value / num_ranks for name in divided if (value := getattr(args, name)) is not None
    }
    return dataclasses.replace(args, **shares)


def rank_spec(spec: ModelSpec, args: EngineArgs) -> ModelSpec:
    """Return the shape of a rank's part of a checkpoint.

    Raises
    ------
    CheckpointError
        The checkpoint cannot be divided; the message has the reason.
    """
    num_ranks, num_splits = args.tensor_parallel, args.num_splits
    if num_splits == 1:
        return spec
    if has_own_attention(spec):
        raise CheckpointError(
            f"{spec.path}: {spec.architecture} has attention of its own, which tensor_parallel does not divide"
        )
    config, head_dims = shard_facts(spec)
    plan = TpPlan(config)
    whole = empty_model(spec, "float32")
    total, splits_heads = _num_elements(whole), plan.splits_heads(whole)
    # The first rank has the most rows of a matrix that cannot be divided evenly.
    shard(whole, {}, config, head_dims, RankGroup(0, num_ranks), num_splits)
    share = _num_elements(whole) / total
    part = dataclasses.replace(
        spec,
        weight_share=share,
        intermediate_size=max(1, spec.intermediate_size // num_ranks),
    )
    if not splits_heads:
        return part
    _check_heads(spec, num_ranks)
    return dataclasses.replace(
        part,
        num_heads=spec.num_heads // num_ranks,
        num_kv_heads=max(1, spec.num_kv_heads // num_ranks),
        kinds=tuple(None if kind is None else _rank_kind(kind, num_ranks) for kind in spec.kinds),
    )


def _rank_kind(kind: LayerKind, num_ranks: int) -> LayerKind:
    return dataclasses.replace(
        kind,
        num_heads=None if kind.num_heads is None else kind.num_heads // num_ranks,
        num_kv_heads=max(1, kind.num_kv_heads // num_ranks),
    )


def _check_heads(spec: ModelSpec, num_ranks: int) -> None:
    for layer, kind in spec.kv_kinds.items():
        heads, kv_heads = kind.num_heads or spec.num_heads, kind.num_kv_heads
        if heads % num_ranks or (kv_heads % num_ranks and num_ranks % kv_heads):
            raise CheckpointError(
                f"{spec.path}: tensor_parallel is {num_ranks}, and the {heads} heads and {kv_heads} KV heads of "
                f"layer {layer} cannot be given to as many ranks in equal numbers"
            )


def _num_elements(model: nn.Module) -> int:
    """Count the elements of all parameters; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())
