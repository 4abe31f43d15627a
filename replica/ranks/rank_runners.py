"""The runners of a leader and of the other ranks.

```
 leader   plan ─▶ message ─▶ forward ⇄ ⇄ ⇄ ─▶ logits ─▶ sample ─▶ tokens ─┐
 rank 1              └─────▶ forward ⇄ ⇄ ⇄ ─▶ its part of the vocabulary  └▶ last tokens     ⇄ sums over ranks
```

On a GPU a rank runs the leader's steps in the leader's order, with a request table and graphs of its own. After each
step it gets the sampled tokens on its device, because the leader may have planned the next step before it knew them.
The leader says when a graph is captured. All ranks have the same graphs, because the sums have the padding of a graph.

On a CPU the message has the tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from quire.protos.adapter_ref import AdapterRef
from quire.replica.adapters.adapter_folder import read_adapter
from quire.replica.core.adapter import Adapter, AdapterLoad
from quire.replica.core.step_plan import SamplingBatch, StepPlan
from quire.replica.device.device import Stream
from quire.replica.model.layers.linear_parts import LinearPart
from quire.replica.model.sharded.rank_group import RankGroup
from quire.replica.ranks import step_message
from quire.replica.ranks.rank_copies import OwnCopies
from quire.replica.ranks.rank_links import RankLinks
from quire.replica.ranks.step_message import Capture, Ready, Saves, SlotLoad, Task
from quire.replica.runner.runner import Runner
from quire.replica.runner.step_outputs import InFlight
from quire.replica.sampling.step_sampler import Masks


class RankRunner(Runner):
    """What the runners of all ranks have in common.

    Parameters
    ----------
    args, options
        Of `Runner`.
    group
        The ranks.
    """

    def __init__(self, *args: Any, group: RankGroup, **options: Any):
        super().__init__(*args, **options)
        self.group = group
        # Whether steps are queued, on a device that has a request table.
        self._is_queued = not self._device.is_immediate
        if self.graphs is not None:
            self.graphs.agree = group.worst

    def _sample(self, in_flight: InFlight, sampling: SamplingBatch, masks: Masks) -> None:
        super()._sample(in_flight, sampling, masks)
        if self._is_queued:
            work = partial(self.group.copy_from_first, self._outputs.last_token)
            self._device.run(Stream.COMPUTE, work, name="last tokens")

    def _await_saves(self) -> None:
        """Wait until every rank has written its part of the blocks that it saves: the node's pool has them then.

        On a GPU copies run beside the steps, and the others tell when theirs have ended (`rank_copies.py`).
        """
        if not self._is_queued:
            self.group.wait_for_all()


class AdapterOfRanks(NamedTuple):
    """`Adapter.weights` of a leader."""

    own: Any
    others: tuple[bytes, ...]  # `encode_adapter`, for each other rank


class LeadingRunner(RankRunner):
    """Sends each step to the other ranks before it launches it.

    Parameters
    ----------
    args, options
        Of `RankRunner`.
    links
        The connections to the other ranks.

    Attributes
    ----------
    layers_of_others
        The linear layers of each other rank, by name.
    """

    layers_of_others: Sequence[Mapping[str, LinearPart]] = ()
    _sent_s = 0.0  # that the other ranks' parts of a step's adapters took

    def __init__(self, *args: Any, links: RankLinks, **options: Any):
        super().__init__(*args, **options)
        self.links = links
        if self._is_queued:
            self.host_pool.on_all_ranks = links.copies.add
        if self.graphs is not None:
            self.graphs.before_capture = lambda key: links.send(step_message.encode_capture(key))

    @property
    def adapter_reader(self) -> Callable[[Path], AdapterOfRanks] | None:
        """See `Runner.adapter_reader`."""
        return None if self.adapted is None else self._read_adapter

    def _read_adapter(self, folder: Path) -> AdapterOfRanks:
        """The leader keeps the parts of all ranks, so that a later load does not need the folder."""
        assert self.adapted is not None
        own, others = self.adapted.read(folder), []
        for layers in self.layers_of_others:
            adapted = {name: layers[name] for name in self.adapted.layers}
            part = read_adapter(folder, adapted, self.adapted.max_rank, self.adapted.dtype)
            others.append(step_message.encode_adapter(part))
        return AdapterOfRanks(own, tuple(others))

    def _load_adapters(self, loads: Sequence[AdapterLoad]) -> None:
        assert self.adapted is not None
        own = [AdapterLoad(slot, Adapter(a.ref, a.weights.own)) for slot, a in loads]
        self.adapted.load(own, self._sent_s)

    def _launch(self, plan: StepPlan) -> InFlight:
        if plan.adapter_loads:
            self._send_adapters(plan.adapter_loads)
        self.links.send(self._message(plan))
        try:
            in_flight = super()._launch(plan)
            if len(plan.saves):
                self._await_saves()
            return in_flight
        except Exception as error:
            # Ranks are out of step from now on, so that the replica ends. The cause may be another rank.
            self.links.fail(f"{type(error).__name__}: {error}")
            raise

    def _send_adapters(self, loads: Sequence[AdapterLoad]) -> None:
        began = time.perf_counter()
        for slot, adapter in loads:
            name, parts = adapter.ref.name, adapter.weights.others
            self.links.send_each(
                [step_message.encode_slot_load(slot, name, part) for part in parts]
            )
        self._sent_s = time.perf_counter() - began

    def forward(self, plan: StepPlan) -> torch.Tensor:
        """See `Runner.forward`."""
        self.links.send(self._message(plan))
        return super().forward(plan)

    def save_blocks(self, pairs: np.ndarray) -> None:
        """See `Runner.save_blocks`."""
        self.links.send(step_message.encode_saves(pairs))
        super().save_blocks(pairs)
        self._await_saves()

    def mark_ready(self) -> None:
        """See `Runner.mark_ready`."""
        super().mark_ready()
        self.links.send(step_message.encode_ready())

    def _message(self, plan: StepPlan) -> bytes:
        """Encode a plan. On a CPU the leader alone knows which tokens it has sampled last."""
        if self._is_queued:
            return step_message.encode(plan)
        ids = torch.from_numpy(plan.token_ids.astype(np.int64))
        return step_message.encode(plan, self._outputs.known(ids).numpy())


class FollowingRunner(RankRunner):
    """Executes the steps of a leader, which samples."""

    _launched: InFlight | None = None  # the newest step

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.copies = OwnCopies()
        if self._is_queued:
            self.host_pool.on_all_ranks = self.copies.add

    def follow(self, task: Task) -> None:
        """Do what the leader does."""
        if isinstance(task, StepPlan):
            self._step(task)
        elif isinstance(task, Saves):
            self.save_blocks(task.pairs)
            self._await_saves()
        elif self.graphs is not None and isinstance(task, Capture):
            self.graphs.capture_with_leader(task.key)
        elif isinstance(task, Ready):
            self._be_ready()
        elif self.adapted is not None and isinstance(task, SlotLoad):
            adapter = Adapter(AdapterRef(task.name, "", ""), self.adapted.pack(task.weights))
            self._load_adapters([AdapterLoad(task.slot, adapter)])

    def _step(self, plan: StepPlan) -> None:
        in_flight = self.launch(plan)
        if in_flight.sample is not None:
            self._sample(in_flight, plan.sampling, None)
        if len(plan.saves):
            self._await_saves()
        # As of the leader, at most two steps are in flight.
        before, self._launched = self._launched, in_flight
        if before is not None:
            self.collect(before)

    def _be_ready(self) -> None:
        if self.config.deterministic:
            self.kernels.warm_fixed_products(self.model, self.config.max_batch_tokens)
        if self.graphs is not None:
            self.graphs.serve()
        self.mark_ready()

    def _sample(self, in_flight: InFlight, sampling: SamplingBatch, masks: Masks) -> None:
        in_flight.slot.num_tokens = 0  # which the host gets
        in_flight.sample = _sample_nothing
        super()._sample(in_flight, sampling, masks)


def _sample_nothing(sampling: SamplingBatch, masks: Masks) -> None:
    pass
