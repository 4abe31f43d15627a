"""Captures, replays and frees CUDA graphs of steps. No other module does this.

```
 start   [ rehearse 256 ▸ capture 256 ][ 128 ][ 64 ] ...        before the first request
 step    find the size ▸ stage into the one set of inputs ▸ replay
 idle    [ rehearse 48 ▸ capture 48 ]  one at a time            while there is no request; new requests come in between
```

A graph is captured with padding inputs: the padding row, whose blocks are the trash block. First the step runs with
these inputs without being captured: the rehearsal.
It compiles kernels, allocates workspaces of libraries, and rejects a step that makes the host wait: its capture would
fail, and a failed capture can disable all captures of the process. All graphs share one memory pool for intermediate
results. Results that are read after a replay are in buffers outside this pool.

A graph is freed only to make room for another, with no work in flight.

If several ranks compute the model, a rehearsal has sums over all of them, so all capture when the leader does, and keep
the graph only if all can.
"""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from quire.replica.device.device import Device, Graph, Tensors, Work
from quire.replica.runner.graphs.graph_key import GraphKey, GraphPart
from quire.replica.runner.graphs.graph_policy import GraphPolicy

logger = logging.getLogger(__name__)
# Results of an attempt to capture; of several ranks the largest counts.
_CAPTURED, _NO_MEMORY, _FAILED = range(3)
# Input tensors of a step, on the device.
Inputs = tuple[torch.Tensor, ...]
Place = tuple[int, tuple[int, ...], tuple[int, ...]]  # address, shape, strides


class CapturedStep(Protocol):
    """The part of `PaddedStep` used here: a step on fixed addresses."""

    sampled: torch.Tensor  # [max_rows] int64, written by `whole`
    logits: torch.Tensor | None  # [max_rows, vocab], written by `to_logits`

    def reserve_logits(self) -> None: ...

    # `inputs` are results of `PaddingInputs.send_padding`.
    def whole(self, inputs: Any, num_blocks: int | None = None) -> None: ...

    def to_logits(self, inputs: Any, num_blocks: int | None = None) -> None: ...


class PaddingInputs(Protocol):
    """The part of `InputRing` used here."""

    def send_padding(self, key: GraphKey) -> Inputs:
        """Upload inputs of this shape in which every row is padding."""
        ...


class CaptureError(RuntimeError):
    """A rank cannot capture a step."""


class StaleGraph(RuntimeError):
    """The graph to replay has been freed, or one of its buffers has moved since the capture."""


@dataclass(frozen=True, slots=True)
class CachedGraph:
    """A captured graph, with address, shape and strides of its buffers at capture."""

    key: GraphKey
    graph: Graph
    places: Mapping[str, Place]


class GraphCache:
    """Owns the graphs.

    Parameters
    ----------
    policy
        Decides which graphs are captured and used.
    step, inputs
        The step to capture, and the source of its padding inputs.
    block_size
        Tokens of a block.
    buffers
        Returns the current tensors that graphs read or write, by name.
    mode
        auto | on | off. "auto" captures if device and model allow it; "on" raises if they do not.
    checks_addresses
        Before each replay, compare the addresses of `buffers` with those at capture.
    off_because
        Reason why the model's steps cannot be captured; None: they can.

    Attributes
    ----------
    before_capture
        Called with the key before each attempt to capture a graph.
    agree
        Called after each attempt with its result, returns the worst result of all ranks. None: there is one rank.

    Raises
    ------
    ValueError
        `mode` is "on" and device or model have no graphs.
    """

    before_capture: Callable[[GraphKey], None] | None = None
    agree: Callable[[int], int] | None = None

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
        off_because: str | None = None,
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
        self._serves = False  # False during warm-up, when steps must not use graphs
        self.off_because: str | None = None  # reason why no step is captured
        if mode == "off":
            self.off_because = "cuda_graphs is off"
        elif (reason := device.no_graphs_because or off_because) is not None:
            if mode == "on":
                raise ValueError(f"cuda_graphs is on, but {reason}")
            self.off_because = reason

    def __len__(self) -> int:
        return len(self._graphs)

    def capture_first(self) -> None:
        """Capture the graphs of the policy's `first`, before serving.

        Raises
        ------
        RuntimeError
            A step cannot be captured and `mode` is "on".
        torch.OutOfMemoryError
            The device has no memory left for these graphs, while the engine starts.
        """
        if self.off_because is None:
            self._step.reserve_logits()  # at start, so that serving allocates nothing
            for key in self.policy.first():
                error = self._try_to_capture(key)
                if error is not None and self._mode == "on":
                    raise RuntimeError(f"cuda_graphs is on: {_failure(key, error)}") from error
                if error is not None:
                    break
        self.serve()

    def serve(self) -> None:
        """From now on steps use graphs."""
        self._serves = self.off_because is None
        if not self._serves:
            logger.info("steps run without graphs: %s", self.off_because)

    def measure(self, count: int) -> list[int]:
        """Capture the first graphs, measure them, and free them again.

        Returns
        -------
        Bytes of at most `count` graphs, largest first. The first value includes memory that all graphs share.
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
        """Return the free bytes of the device, after giving memory that torch caches back to the device."""
        self._device.trim()
        return self._device.free_bytes()

    def _free(self, key: GraphKey) -> None:
        self._device.release(self._graphs.pop(key).graph)
        self.policy.remove(key)

    def find(
        self, num_rows: int, part: GraphPart, *, is_adapted: bool = False
    ) -> CachedGraph | None:
        """Return the graph for a step of `num_rows` decoding rows; None: run it kernel by kernel."""
        if not self._serves:
            return None
        key = self.policy.find(num_rows, part, is_adapted=is_adapted)
        return None if key is None else self._graphs[key]

    def find_mixed(
        self,
        num_rows: int,
        num_tokens: int,
        kv_len: int,
        part: GraphPart,
        *,
        is_adapted: bool = False,
    ) -> CachedGraph | None:
        """Return the graph for a mixed step; arguments as for `GraphPolicy.find_mixed`."""
        if not self._serves or not self.policy.has_mixed:
            return None
        key = self.policy.find_mixed(num_rows, num_tokens, kv_len, part, is_adapted=is_adapted)
        return None if key is None else self._graphs[key]

    def replay(self, cached: CachedGraph) -> None:
        """Queue a replay of a graph.

        Raises
        ------
        StaleGraph
            The graph has been freed, or a buffer has moved.
        """
        if self._graphs.get(cached.key) is not cached:
            raise StaleGraph(f"the graph of {cached.key} has been freed")
        if self._checks_addresses:
            _compare(cached, _places(self._buffers()))
        self._device.replay(cached.graph)

    def use_idle(self) -> bool:
        """Capture one graph that steps have missed often enough; return whether there was such a graph.

        Call it with no step in flight and no request waiting.
        """
        if not self._serves or self._device.no_graphs_because is not None:
            return False
        key = self.policy.wish()
        if key is None:
            return False
        self._try_to_capture(key)
        return True

    def _try_to_capture(self, key: GraphKey) -> Exception | None:
        """Try to capture a graph; on failure, steps run without it.

        Returns
        -------
        The error, or None if the graph was captured or the device had no memory for it while serving.
        """
        try:
            self._capture_or_make_room(key)
        except torch.OutOfMemoryError:
            # While the engine starts, its other parts need memory too.
            if not self._serves:
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
        """Capture a graph. If memory is short, empty torch's cache and try again.

        The cache is not emptied before the first attempt, because the next step without a graph would be slower.
        """
        with contextlib.suppress(torch.OutOfMemoryError):  # drop the traceback: it holds memory
            self.capture(key)
            return
        self._device.trim()
        self.capture(key)

    def capture_with_leader(self, key: GraphKey) -> None:
        """Capture a graph because the leader of the ranks does; `agree` decides whether it is kept."""
        with contextlib.suppress(CaptureError, torch.OutOfMemoryError):
            self.capture(key)

    def capture(self, key: GraphKey) -> None:
        """Rehearse a step with padding inputs, then capture it. No step may be in flight."""
        device, step, n = self._device, self._step, key.num_rows
        if self.before_capture is not None:
            self.before_capture(key)
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
        graph = self._captured(work, str(key), memory)
        places = _places(self._buffers()) if self._checks_addresses else {}
        self._graphs[key] = CachedGraph(key, graph, places)
        self.policy.add(key)
        self.num_captures += 1

    def _captured(self, work: Work, name: str, memory: Mapping[str, Tensors]) -> Graph:
        """Capture work. Raises `CaptureError` or OutOfMemoryError if another rank cannot."""
        if self.agree is None:
            return self._device.capture(work, name=name, **memory)
        graph: Graph | None = None
        error: Exception | None = None
        try:
            graph = self._device.capture(work, name=name, **memory)
        except Exception as raised:
            error = raised
        result = _CAPTURED
        if error is not None:
            result = _NO_MEMORY if isinstance(error, torch.OutOfMemoryError) else _FAILED
        result = self.agree(result)
        if result == _CAPTURED:
            assert graph is not None
            return graph
        if graph is not None:
            self._device.release(graph)
        if result == _NO_MEMORY:
            raise torch.OutOfMemoryError(f"a rank has no memory for {name}") from error
        raise CaptureError(f"a rank cannot capture {name}") from error


def _failure(key: GraphKey, error: BaseException) -> str:
    """Describe the original error of a failed capture; `error` may be a later one, of ending the capture."""
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
