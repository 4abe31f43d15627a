"""Recurrent layers: transformers' own modules compute them, with the states of Quire's slots.

`model/recurrence/` replaces the modules that Quire's kernels equal; the others run as described here.

A step's tokens are one sequence for the decoder. A recurrent module would carry its state from one request into the
next, so its call is split: rows with equally many tokens are one batch. transformers' modules ask their `cache`
argument for earlier states, and give it the new ones; here it is a `RowsCache`.

```
 hidden [1, T, H]   [ a ][ b ][ c ][ d d d d d ]
                      │    │    │        │
 batches            [ a b c ] of 1     [ d ] of 5 tokens        states: slot ─▶ RowsCache ─▶ module ─▶ slot
                            │             │
 result [1, T, H]   [ a ][ b ][ c ][ d d d d d ]
```

If a snapshot is taken after three tokens of d, they are a batch of their own, and the other two another one after it.

Recurrent modules are found by what they do: a trial call asks a cache for states, or gives it some. The same call shows
the shapes of the states. Further trials with NaN in a state show whether a call of several tokens reads it. Some
classes (Mamba-1) read their state in calls of one token only. Rows with earlier tokens then run token by token.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from quire.kernels.recurrence.recurrent_rows import RecurrentRows
from quire.replica.checkpoint.wrapped_text import text_config
from quire.replica.device.state_pool import StateName, StatePool, StateShape

# Names of the argument through which modules of transformers get their cache, in versions 5.17 to 5.24.
_CACHE_NAMES = ("cache", "past_key_values", "cache_params")
_TRIAL_TOKENS = 3


class RowsCache:
    """The states of rows of equal length, as a module of transformers reads and writes its cache.

    Parameters
    ----------
    states
        The layer's states after the rows' earlier tokens, [rows, ...] each; empty if there are no earlier tokens.
        A module may change them in place.
    """

    record_past = False

    def __init__(self, states: Mapping[StateName, torch.Tensor]):
        self._has_earlier = bool(states)
        self.states = dict(states)
        # Modules of transformers 5.17 read `cache.layers[layer].conv_states[index]`.
        self.layers = _EveryLayer(self)

    @property
    def conv_states(self) -> dict[int, torch.Tensor]:
        return {index: x for (kind, index), x in self.states.items() if kind == "conv"}

    @property
    def recurrent_states(self) -> dict[int, torch.Tensor]:
        return {index: x for (kind, index), x in self.states.items() if kind == "recurrent"}

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        return self._has_earlier

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._earlier(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._earlier(("recurrent", state_idx))

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        return self._earlier(("linear", 0))

    def _earlier(self, name: StateName) -> torch.Tensor | None:
        return self.states[name] if self._has_earlier else None

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: object,
    ) -> torch.Tensor:
        """Keep the last inputs of a convolution, and return them with the earlier ones, [rows, channels, inputs]."""
        earlier = self.states.get(("conv", state_idx))
        if earlier is not None:
            size = earlier.shape[-1]
            inputs = torch.cat([earlier, conv_states], dim=-1)
        else:
            size = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
            inputs = functional.pad(conv_states, (max(0, size - conv_states.shape[-1]), 0))
        self.states["conv", state_idx] = inputs[..., inputs.shape[-1] - size :]
        return inputs

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> torch.Tensor:
        self.states["recurrent", state_idx] = recurrent_states
        return recurrent_states

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        self.states["linear", 0] = linear_cache


class _EveryLayer:
    """The list of layers of a cache that has one layer, whatever its index."""

    def __init__(self, cache: RowsCache):
        self._cache = cache

    def __getitem__(self, layer: int) -> RowsCache:
        return self._cache


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Rows of a step, or parts of rows, with equally many tokens, all with or all without earlier tokens."""

    tokens: torch.Tensor  # [rows, tokens of a row] int64, indices among the step's tokens
    slots: torch.Tensor  # [rows] int64
    has_earlier: bool
    # Rows whose states are copied after these tokens: [k, 2] int64, (index of the row in the batch, slot of the
    # snapshot). None: there are none.
    snapshots: torch.Tensor | None = None


class _Part(NamedTuple):
    """Consecutive tokens of a row, after which there may be a snapshot."""

    row: int
    begin: int  # index of the first token among the step's tokens
    slot: int | None  # of the snapshot


@dataclass(frozen=True)
class StepCache:
    """The `cache` of a decoder during one step: recurrent layers find the slots of the step's rows in it.

    Parameters
    ----------
    make_batches
        Sorts the rows for modules of transformers; None: the host does not know the rows.
    """

    pool: StatePool
    rows: RecurrentRows
    make_batches: Callable[[], list[RowBatch]] | None = None
    is_compileable = False

    @classmethod
    def of(
        cls,
        pool: StatePool,
        slots: np.ndarray,
        num_query: np.ndarray,
        kv_len: np.ndarray,
        saves: np.ndarray,
    ) -> StepCache:
        """Describe a step's n rows.

        Parameters
        ----------
        slots, num_query, kv_len
            [n] slot, number of tokens in this step, and number of tokens with this step, of each row.
        saves
            [k, 3] int64, snapshots: index of the row, number of its tokens in this step before it, and slot.
        """
        device = pool.data.device
        rows = RecurrentRows.of(slots, num_query, kv_len, saves, device)
        make = functools.partial(_sort_rows, slots, num_query, kv_len, saves, device)
        return cls(pool, rows, make)

    @functools.cached_property
    def batches(self) -> list[RowBatch]:
        """The rows in batches of equal length."""
        assert self.make_batches is not None
        return self.make_batches()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, **_: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a step's keys and values unchanged: Quire's attention stores them."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def has_previous_state(self, layer_idx: int | None = None) -> bool:
        return False


def _sort_rows(
    slots: np.ndarray,
    num_query: np.ndarray,
    kv_len: np.ndarray,
    saves: np.ndarray,
    device: torch.device,
) -> list[RowBatch]:
    """Sort a step's rows into batches; arguments as for `StepCache.of`."""
    cuts: dict[int, dict[int, int]] = {}
    for row, count, slot in saves.tolist():
        cuts.setdefault(row, {})[count] = slot
    # Parts of rows by number of parts before, number of tokens, and whether there are earlier tokens.
    members: dict[tuple[int, int, bool], list[_Part]] = {}
    begins = np.cumsum(num_query) - num_query
    for row, (begin, count, length) in enumerate(
        zip(begins.tolist(), num_query.tolist(), kv_len.tolist(), strict=True)
    ):
        own = cuts.get(row, {})
        ends = sorted({*own, count})
        for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            has_earlier = length > count or i > 0
            part = _Part(row, begin + start, own.get(end))
            members.setdefault((i, end - start, has_earlier), []).append(part)
    batches = []
    for (_, count, has_earlier), parts in sorted(members.items(), key=lambda item: item[0][0]):
        starts = np.array([part.begin for part in parts])
        kept = [(i, part.slot) for i, part in enumerate(parts) if part.slot is not None]
        batches.append(
            RowBatch(
                torch.from_numpy(starts[:, None] + np.arange(count)).to(device),
                torch.from_numpy(slots[[part.row for part in parts]].astype(np.int64)).to(device),
                has_earlier,
                torch.tensor(kept, device=device) if kept else None,
            )
        )
    return batches


class SplitForward:
    """Calls a recurrent module's forward for one batch of rows after the other.

    Without a `StepCache` it is the module's own forward.

    Parameters
    ----------
    continues_by_token
        Whether rows with earlier tokens run token by token.

    Attributes
    ----------
    names, cache_name
        Names of the module's arguments, and of the one for its cache.
    """

    splits_rows = True

    def __init__(self, module: nn.Module, continues_by_token: bool):
        self._forward = module.forward
        self._continues_by_token = continues_by_token
        self._layer = module.layer_idx
        self.__signature__ = inspect.signature(module.forward)
        self.names = list(self.__signature__.parameters)
        self.cache_name = cache_argument(module) or ""

    def __call__(self, *args: Any, **given: Any) -> Any:
        given |= dict(zip(self.names, args, strict=False))
        given.pop("quire", None)
        cache = given.get(self.cache_name)
        if not isinstance(cache, StepCache):
            return self._forward(**given)
        hidden = given[self.names[0]]
        batches = [part for batch in cache.batches for part in self._parts(batch)]
        results = [self._run(batch, cache.pool, hidden.shape[1], given) for batch in batches]
        first = results[0]
        main = first[0] if isinstance(first, tuple) else first
        out = torch.empty((hidden.shape[1], main.shape[-1]), dtype=main.dtype, device=main.device)
        for batch, result in zip(batches, results, strict=True):
            rows = result[0] if isinstance(result, tuple) else result
            out[batch.tokens.view(-1)] = rows.flatten(0, 1)
        return (out[None], *first[1:]) if isinstance(first, tuple) else out[None]

    def _parts(self, batch: RowBatch) -> Sequence[RowBatch]:
        if not (self._continues_by_token and batch.has_earlier):
            return [batch]
        parts = [RowBatch(tokens, batch.slots, True) for tokens in batch.tokens.split(1, dim=1)]
        return [*parts[:-1], replace(parts[-1], snapshots=batch.snapshots)]

    def _run(self, batch: RowBatch, pool: StatePool, num_tokens: int, given: dict[str, Any]) -> Any:
        cache = RowsCache(pool.load(self._layer, batch.slots) if batch.has_earlier else {})
        own = {name: _rows_of(value, batch.tokens, num_tokens) for name, value in given.items()}
        result = self._forward(**{**own, self.cache_name: cache})
        pool.store(self._layer, batch.slots, cache.states)
        if batch.snapshots is not None:
            rows, slots = batch.snapshots.unbind(1)
            kept = {name: state[rows] for name, state in cache.states.items()}
            pool.store(self._layer, slots, kept)
        return result


def _rows_of(value: Any, tokens: torch.Tensor, num_tokens: int) -> Any:
    """Return the part of an argument that belongs to some tokens, if it has values for each token: [1, T, ...]."""
    if isinstance(value, tuple):
        return tuple(_rows_of(item, tokens, num_tokens) for item in value)
    if isinstance(value, torch.Tensor) and value.shape[:2] == (1, num_tokens):
        return value[0][tokens]
    return value


def cache_argument(module: nn.Module) -> str | None:
    """Return the name of the argument through which a module gets its cache; None: it has none."""
    parameters = inspect.signature(module.forward).parameters
    return next((name for name in _CACHE_NAMES if name in parameters), None)


def split_state_layers(model: nn.Module) -> list[StateShape]:
    """Let the recurrent modules of a model compute a step's rows separately. Further calls change nothing.

    Returns
    -------
    All states of the model; [] if it is not recurrent. The model may be on the meta device.
    """
    hidden = _trial_input(model)
    found = _state_modules(model, hidden)
    for module, states in found.items():
        if not getattr(module.forward, "splits_rows", False):
            module.forward = SplitForward(module, _ignores_a_state(module, hidden, states))
    return [
        StateShape(module.layer_idx, name, tuple(state.shape[1:]), state.dtype)
        for module, states in found.items()
        for name, state in states.items()
    ]


def _trial_input(model: nn.Module) -> torch.Tensor:
    weight = model.get_input_embeddings().weight
    shape = (1, _TRIAL_TOKENS, text_config(model.config).hidden_size)
    return torch.zeros(shape, dtype=weight.dtype, device=weight.device)


def _state_modules(
    model: nn.Module, hidden: torch.Tensor
) -> dict[nn.Module, dict[StateName, torch.Tensor]]:
    """Return the innermost modules that read or write states, and the states of one row after a trial call."""
    found: dict[nn.Module, dict[StateName, torch.Tensor]] = {}
    for module in model.modules():
        if isinstance(getattr(module, "layer_idx", None), int) and cache_argument(module):
            cache = RowsCache({})
            # Modules that are not recurrent fail, because they need positions too.
            with contextlib.suppress(Exception):
                _try_call(module, hidden, cache)
            if cache.states:
                found[module] = cache.states
    outer = {
        module
        for module in found
        for other in module.modules()
        if other in found and other is not module
    }
    return {module: states for module, states in found.items() if module not in outer}


def _ignores_a_state(
    module: nn.Module, hidden: torch.Tensor, states: Mapping[StateName, torch.Tensor]
) -> bool:
    """Whether a call of several tokens computes the same with other earlier states; False on the meta device."""
    if hidden.device.type == "meta":
        return False
    for changed in states:
        given = {name: torch.zeros_like(state) for name, state in states.items()}
        given[changed].fill_(float("nan"))
        if not _try_call(module, hidden, RowsCache(given)).isnan().any():
            return True
    return False


@torch.inference_mode()
def _try_call(module: nn.Module, hidden: torch.Tensor, cache: RowsCache) -> torch.Tensor:
    """Call a module as if it were recurrent, without the arguments for attention, and return its first result."""
    result = call_recurrent(module, hidden, cache)
    return result[0] if isinstance(result, tuple) else result


def call_recurrent(module: nn.Module, hidden: torch.Tensor, cache: RowsCache | StepCache) -> Any:
    """Call a module with a cache and without the arguments for attention."""
    parameters = inspect.signature(module.forward).parameters
    first, *others = parameters
    given = {
        name: None
        for name in others
        if parameters[name].default is inspect.Parameter.empty
        and parameters[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    }
    return module(**{**given, first: hidden, cache_argument(module) or "": cache})
