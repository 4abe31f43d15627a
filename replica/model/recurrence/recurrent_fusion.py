"""Replaces the recurrences of transformers' modules by Quire's kernels, where both compute the same.

A module's names and shapes decide which mixers it may be (`recurrent_mixers.py`). One module of each kind is compared
with its mixer on random input: two rows in three steps, with a snapshot inside of a row, so that rows begin, continue,
decode and are copied. Outputs and states must agree; else the module's own code stays.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from quire.replica.checkpoint.wrapped_text import text_config
from quire.replica.device.state_pool import StateName, StatePool, StateShape
from quire.replica.model.fusion.fuse_report import MAX_DEVIATION, FuseReport, deviation
from quire.replica.model.layers.state_layers import SplitForward, StepCache, call_recurrent
from quire.replica.model.recurrence.recurrent_mixers import (
    Build,
    Mixer,
    RecurrenceKernels,
    candidates,
)

logger = logging.getLogger(__name__)

_Kind: TypeAlias = tuple[type, str, str, str]

_KIND = "recurrences"
# Slots of the proof's two rows; the snapshot's slot is the one after the trash slot.
_SLOTS = np.array([1, 0])
_SNAPSHOT = 3
# Tokens of each row in three steps; the first row has a snapshot after its second token. Kernels may differ where each
# row has one token.
_LENGTHS = ((5, 1), (1, 4), (1, 1))


class MixerForward:
    """A recurrent module's forward by a mixer. Without a `StepCache` it is the module's own forward.

    Parameters
    ----------
    split
        The forward that it replaces.
    returns_tuple
        Whether the module returns a tuple, whose further entries its caller does not read.
    """

    splits_rows = True

    def __init__(self, split: SplitForward, layer: int, mixer: Mixer, returns_tuple: bool):
        self._split = split
        self._layer = layer
        self._returns_tuple = returns_tuple
        self.mixer = mixer
        self.__signature__ = split.__signature__

    def __call__(self, *args: Any, **given: Any) -> Any:
        given |= dict(zip(self._split.names, args, strict=False))
        cache = given.get(self._split.cache_name)
        if not isinstance(cache, StepCache):
            return self._split(**given)
        out = self.mixer(given[self._split.names[0]], cache.pool.views(self._layer), cache.rows)
        return (out, None) if self._returns_tuple else out


@torch.inference_mode()
def fuse_recurrences(
    model: nn.Module, layout: Sequence[StateShape], kernels: RecurrenceKernels
) -> FuseReport:
    """Replace the forward of each recurrent module that a mixer equals, in place."""
    report = FuseReport()
    weight = model.get_input_embeddings().weight
    like = weight.new_empty(0)
    width = text_config(model.config).hidden_size
    steps = [torch.randn(1, sum(n), width).to(like) for n in _LENGTHS]
    # By kind of module: the builder that was proven and whether the module returns a tuple; or why there is none.
    known: dict[_Kind, _Proven | str] = {}
    for name, module in model.named_modules():
        if not isinstance(module.forward, SplitForward):
            continue
        states = [state for state in layout if state.layer == module.layer_idx]
        kind = _kind_of(module, states)
        if kind not in known:
            known[kind] = _prove(module, states, kernels, steps)
        proven = known[kind]
        if isinstance(proven, str):
            report.dropped.append(f"recurrence {name} ({type(module).__name__}): {proven}")
            continue
        mixer = proven.build(module, _one_request(states), kernels)
        module.forward = MixerForward(module.forward, module.layer_idx, mixer, proven.returns_tuple)
        report.fused[_KIND] += 1
    logger.info("recurrent layers: %s", report)
    return report


@dataclass(frozen=True, slots=True)
class _Proven:
    build: Build
    returns_tuple: bool


def _kind_of(module: nn.Module, layout: Sequence[StateShape]) -> _Kind:
    """Return what modules share that compute the same with other weights: code, numbers, shapes.

    One module of each kind is compared: in transformers a prompt of a few tokens can take seconds in each layer.
    """
    plain = (bool, int, float, str, type(None))
    attributes = {
        n: v for n, v in vars(module).items() if isinstance(v, plain) and n != "layer_idx"
    }
    shapes = [(name, tuple(x.shape)) for name, x in module.state_dict().items()]
    return (type(module), repr(attributes), repr(shapes), repr([(s.name, s.shape) for s in layout]))


def _prove(
    module: nn.Module,
    layout: Sequence[StateShape],
    kernels: RecurrenceKernels,
    steps: Sequence[torch.Tensor],
) -> _Proven | str:
    """Find the mixer that equals a module, or the reasons why none does."""
    reasons = []
    for build in candidates(module):
        try:
            mixer = build(module, _one_request(layout), kernels)
            return _Proven(build, _compare(module, mixer, layout, steps))
        # Another structure, or shapes and dtypes that the kernels reject.
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            reasons.append(str(error))
    return "; ".join(reasons) or "its structure is unknown"


def sorts_rows(model: nn.Module) -> bool:
    """Whether modules of transformers compute some of a model's recurrent layers."""
    return any(isinstance(module.forward, SplitForward) for module in model.modules())


def _one_request(layout: Sequence[StateShape]) -> dict[StateName, torch.Tensor]:
    return {s.name: torch.empty(1, *s.shape, dtype=s.dtype, device="meta") for s in layout}


def _compare(
    module: nn.Module, mixer: Mixer, layout: Sequence[StateShape], steps: Sequence[torch.Tensor]
) -> bool:
    """Raise ValueError if outputs or states of random steps differ by more than rounding.

    Returns
    -------
    Whether the module returns a tuple.
    """
    layer = module.layer_idx
    pools = [StatePool(layout, 2, 1, device=steps[0].device.type) for _ in range(2)]
    pools[0].poison()  # a mixer must not read the slot of a row without earlier tokens
    bound = MAX_DEVIATION[steps[0].dtype]
    kv_len = np.zeros(2, np.int64)
    is_tuple = False
    for i, (hidden, lengths) in enumerate(zip(steps, _LENGTHS, strict=True)):
        kv_len = kv_len + lengths
        saves = np.array([[0, 2, _SNAPSHOT]] if i == 0 else [], np.int64).reshape(-1, 3)
        own, other = (StepCache.of(p, _SLOTS, np.array(lengths), kv_len, saves) for p in pools)
        expected = call_recurrent(module, hidden, other)
        if is_tuple := isinstance(expected, tuple):
            expected = expected[0]
        found = mixer(hidden, pools[0].views(layer), own.rows)
        if found.shape != expected.shape or found.dtype != expected.dtype:
            raise ValueError(
                f"returns {list(found.shape)} {found.dtype}, the module {list(expected.shape)} {expected.dtype}"
            )
        _check("output", found, expected, bound)
    slots = [*_SLOTS.tolist(), _SNAPSHOT]
    states = mixer.module_states({n: v[slots] for n, v in pools[0].views(layer).items()})
    for name, view in pools[1].views(layer).items():
        _check(f"state {name[0]}", states[name], view[slots], bound)
    return is_tuple


def _check(what: str, found: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    deviates = deviation(found.float(), expected.float())
    if not deviates <= bound:
        raise ValueError(f"{what} deviates by {deviates:.2g}, at most {bound:g} are rounding")
