"""Captured graphs of steps: the only place that captures, replays and frees them.

```
 start   [ rehearse 256 ▸ capture 256 ][ 128 ][ 64 ] ...        before the first request
 step    find the size ▸ stage into the one set of inputs ▸ replay
 idle    [ rehearse 48 ▸ capture 48 ]  one at a time            while no request is there; between two, mail is read
```

A graph is captured on inputs that are all padding: row R of the table, in the trash block. The step is rehearsed on
them first: kernels are built, the libraries get their workspaces, and a step that makes the host wait is refused. Its
capture would fail, and that can end all captures of the process. All graphs share the device's pool for what they
compute in between; what outlives a replay lies outside of it.

A graph is freed only here, with nothing in flight, to make room for another.
"""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from quire.replica.device.device import Device, Graph
from quire.replica.runner.graphs.graph_key import GraphKey, GraphPart
from quire.replica.runner.graphs.graph_policy import GraphPolicy

logger = logging.getLogger(__name__)
# A step's tensors on the device.
Inputs = tuple[torch.Tensor, ...]
Place = tuple[int, tuple[int, ...], tuple[int, ...]]  # address, shape, strides


class CapturedStep(Protocol):
    """What `FixedStep` offers here: a step on fixed addresses."""

    sampled: torch.Tensor  # [max_rows] int64, written by `whole`
    logits: torch.Tensor | None  # [max_rows, vocab], written by `to_logits`

    def reserve_logits(self) -> None: ...

    def whole(self, inputs: Inputs, num_blocks: int | None = None) -> None: ...

    def to_logits(self, inputs: Inputs, num_blocks: int | None = None) -> None: ...


class PaddingInputs(Protocol):
    """What `InputRing` offers here."""

    def send_padding(self, key: GraphKey) -> Inputs:
        """Inputs of a step of this shape in which all rows are padding."""
        ...


class StaleGraph(RuntimeError):
    """A graph would read or write memory that is no longer what it was captured with, or is freed itself."""


@dataclass(frozen=True, slots=True)
class CachedGraph:
    """A captured graph, and where its buffers were."""

    key: GraphKey
    graph: Graph
    places: Mapping[str, Place]


class GraphCache:
    """Owns the graphs.

    Parameters
    ----------
    policy
        Says which.
    step, inputs
        What is captured, and where its inputs lie.
    block_size
        Tokens of a block.
    buffers
        Everything that graphs read or write and do not own, by name: as it is now.
    mode
        auto | on | off. auto: where the device and the model allow it; on: else it is an error.
    checks_addresses
        Compare `buffers` with those at capture before each replay.

    Raises
    ------
    ValueError
        `mode` is "on" and the device has no graphs.
    """

    def __init__(
        self,
        device: Device,
        policy: GraphPolicy,
        step: CapturedStep,
        inputs: PaddingInputs,
        block_size: int,
        buffers: Callable[[], Mapping[str, torch.Tensor]],
        *,
        mode: str,
        checks_addresses: bool,
    ):
        self.policy = policy
        self.num_captures = 0
        self._device = device
        self._step = step
        self._inputs = inputs
        self._block_size = block_size
        self._buffers = buffers
        self._mode = mode
        self._checks_addresses = checks_addresses
        self._graphs: dict[GraphKey, CachedGraph] = {}
        self._serves = False  # steps before, of warm-up, are none that graphs are for
        self.off_because: str | None = None  # None: steps are captured
        if mode == "off":
            self.off_because = "cuda_graphs is off"
        elif device.no_graphs_because is not None:
            if mode == "on":
                raise ValueError(f"cuda_graphs is on, but {device.no_graphs_because}")
            self.off_because = device.no_graphs_because

    def __len__(self) -> int:
        return len(self._graphs)

    def capture_first(self) -> None:
        """Capture what serving begins with.

        Raises
        ------
        RuntimeError
            A step cannot be captured and `mode` is "on".
        torch.OutOfMemoryError
            The device has no memory left for what serving begins with.
        """
        if self.off_because is None:
            self._step.reserve_logits()  # while memory is counted, not when a row first asks for it
            for key in self.policy.first():
                error = self._try_to_capture(key)
                if error is not None and self._mode == "on":
                    raise RuntimeError(f"cuda_graphs is on: {_failure(key, error)}") from error
                if error is not None:
                    break
        self._serves = self.off_because is None
        if not self._serves:
            logger.info("steps run without graphs: %s", self.off_because)

    def measure(self, count: int) -> list[int]:
        """Capture the first graphs, as before serving, and free them again.

        Returns
        -------
        Bytes of the device that each of them took, at most `count`: the largest first, with what all of them share.
        """
        taken: list[int] = []
        if self.off_because is None:
            before = self._untouched_bytes()
            self._step.reserve_logits()
            for key in self.policy.first()[:count]:
                if self._try_to_capture(key) is not None:
                    break
                after = self._untouched_bytes()
                taken.append(before - after)
                before = after
        for key in list(self._graphs):
            self._free(key)
        return taken

    def _untouched_bytes(self) -> int:
        """Free bytes of the device, without what earlier steps and the rehearsal left for reuse."""
        self._device.trim()
        return self._device.free_bytes()

    def _free(self, key: GraphKey) -> None:
        self._device.release(self._graphs.pop(key).graph)
        self.policy.remove(key)

    def find(self, num_rows: int, part: GraphPart) -> CachedGraph | None:
        """The graph for a step of so many rows that decode; None: it runs kernel by kernel."""
        if not self._serves:
            return None
        key = self.policy.find(num_rows, part)
        return None if key is None else self._graphs[key]

    def find_mixed(
        self, num_rows: int, num_tokens: int, kv_len: int, part: GraphPart
    ) -> CachedGraph | None:
        """The graph for a mixed step; arguments as of `GraphPolicy.find_mixed`."""
        if not self._serves or not self.policy.has_mixed:
            return None
        key = self.policy.find_mixed(num_rows, num_tokens, kv_len, part)
        return None if key is None else self._graphs[key]

    def replay(self, cached: CachedGraph) -> None:
        """Queue it.

        Raises
        ------
        StaleGraph
            It has been freed, or a buffer is elsewhere.
        """
        if self._graphs.get(cached.key) is not cached:
            raise StaleGraph(f"the graph of {cached.key} has been freed")
        if self._checks_addresses:
            _compare(cached, _places(self._buffers()))
        self._device.replay(cached.graph)

    def use_idle(self) -> bool:
        """Capture one graph that steps would have taken; returns whether that was worth the while.

        Call it with no step in flight and nobody waiting.
        """
        if not self._serves or self._device.no_graphs_because is not None:
            return False
        key = self.policy.wish()
        if key is None:
            return False
        self._try_to_capture(key)
        return True

    def _try_to_capture(self, key: GraphKey) -> Exception | None:
        """Capture it; what went wrong, if so: then other graphs, or none, serve."""
        try:
            self._capture_or_make_room(key)
        except torch.OutOfMemoryError:
            if not self._serves:  # there is more to come that needs memory
                raise
            self.policy.refuse(key)
            logger.warning("%s cannot be captured: the device has no memory left for it", key)
        except Exception as error:
            if self._graphs or self._serves:
                self.policy.refuse(key)
                logger.warning("%s", _failure(key, error))
            else:
                self.off_because = _failure(key, error)
            return error
        return None

    def _capture_or_make_room(self, key: GraphKey) -> None:
        """Capture it, first with what eager steps keep for reuse left alone: the next of them would pay for that."""
        with contextlib.suppress(torch.OutOfMemoryError):  # whose traceback holds memory too
            self.capture(key)
            return
        self._device.trim()
        self.capture(key)

    def capture(self, key: GraphKey) -> None:
        """Rehearse the step on padding, then capture it; with no step in flight."""
        device, step, n = self._device, self._step, key.num_rows
        device.synchronize()
        if (victim := self.policy.victim()) is not None:
            self._free(victim)
        if key.part is GraphPart.WHOLE:
            body, written = step.whole, step.sampled[:n]
        else:
            step.reserve_logits()
            assert step.logits is not None
            body, written = step.to_logits, step.logits[:n]
        inputs = self._inputs.send_padding(key)
        num_blocks = -(-key.kv_tokens // self._block_size) or None
        work = partial(body, inputs, num_blocks)
        memory = dict(reads=inputs, writes=(written,))
        device.rehearse(work, name=f"rehearsal of {key}", **memory)
        graph = device.capture(work, name=str(key), **memory)
        places = _places(self._buffers()) if self._checks_addresses else {}
        self._graphs[key] = CachedGraph(key, graph, places)
        self.policy.add(key)
        self.num_captures += 1


def _failure(key: GraphKey, error: BaseException) -> str:
    """Say what went wrong first, and where: ending a capture that has failed raises an error of its own."""
    while error.__context__ is not None:
        error = error.__context__
    first_line = str(error).strip().partition("\n")[0]
    *_, frame = traceback.extract_tb(error.__traceback__)
    place = f"{Path(frame.filename).name}:{frame.lineno}"
    return f"{key} cannot be captured: {type(error).__name__} at {place}: {first_line}"


def _places(buffers: Mapping[str, torch.Tensor]) -> dict[str, Place]:
    return {
        name: (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        for name, tensor in buffers.items()
    }


def _compare(cached: CachedGraph, now: Mapping[str, Place]) -> None:
    for name, place in cached.places.items():
        if now.get(name) != place:
            raise StaleGraph(
                f"the graph of {cached.key} was captured with {name} at address, shape and strides {place}, "
                f"which is now at {now.get(name)}"
            )
