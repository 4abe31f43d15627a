"""Steps on a GPU: they upload the inputs, and run a part of the step as a CUDA graph where one was captured.

```
 every row decodes,     [ differences ][ replay: last tokens ▸ model ▸ sample ][ keep ]            plain rows
 or mixed and padded    [ differences ][ replay: last tokens ▸ model ][ masks ▸ sample ▸ keep ]    others
 any other step         [ differences ▸ copies ▸ model ][ masks ▸ sample ▸ keep ]
```

`[ ]` is one piece of work on the compute stream. *Differences* are changes of the request table since the last upload.
Rows are plain if they need no masks, penalties or log-probs. If sampling needs tokens of the step in flight (launched,
not collected), the last piece is queued when these tokens have arrived. Without a graph a step runs kernel by kernel,
unpadded. Graphs do not contain copies of blocks (forks), log-probabilities of prompts, or pooling.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from quire.replica.config import EngineConfig
from quire.replica.core.step_plan import SamplingBatch, StepPlan, StepResult
from quire.replica.core.warmup_plans import TrashPlans
from quire.replica.device.device import Device, Event, Stream, Tensors, Work
from quire.replica.device.kv_pool import KVPool
from quire.replica.device.state_pool import StatePool
from quire.replica.device.time_counters import DeviceTime
from quire.replica.runner.device_steps import Sample
from quire.replica.runner.device_table import DeviceTable, Differences
from quire.replica.runner.forward import Forward
from quire.replica.runner.graphs.graph_cache import CachedGraph, GraphCache
from quire.replica.runner.graphs.graph_key import GraphPart
from quire.replica.runner.graphs.graph_policy import GraphPolicy
from quire.replica.runner.graphs.mixed_shapes import MixedShapes
from quire.replica.runner.model_kernels import ModelKernels
from quire.replica.runner.padded_step import PaddedStep
from quire.replica.runner.ragged_step import RaggedStep
from quire.replica.runner.step_inputs import (
    FixedInputs,
    InputRing,
    StepInputs,
    input_bytes,
    pieces,
    sampling_rows,
)
from quire.replica.runner.step_outputs import InFlight, StepOutputs
from quire.replica.sampling.step_sampler import Masks

_SORTS_ROWS = "modules of transformers compute recurrent layers, for which the host sorts the rows"
# Block table entries of one upload; larger changes take several uploads.
MAX_CHANGES = 8192


class GpuSteps:
    """`DeviceSteps` on a GPU. Owns the inputs, the request table and the graphs on the device.

    Parameters
    ----------
    forward, ragged, outputs
        The runner's forward pass, its step without padding, and its owner of last tokens and result slots.
    pool
        KV cache; padding writes to its trash block.
    kernels
        Its functions sample the tokens.
    states
        Slots of a recurrent model; None for other models.
    sorts_rows
        Whether modules of transformers compute some recurrent layers. Steps are not captured then, because the host
        sorts their rows.

    Raises
    ------
    ValueError
        `cuda_graphs` is "on" and the device has no graphs, or `q_padding` is out of bounds.
    """

    def __init__(
        self,
        config: EngineConfig,
        device: Device,
        pool: KVPool,
        forward: Forward,
        ragged: RaggedStep,
        outputs: StepOutputs,
        kernels: ModelKernels,
        states: StatePool | None = None,
        sorts_rows: bool = False,
    ):
        self._config = config
        self._device = device
        self._pool = pool
        self._forward = forward
        self._ragged = ragged
        self._outputs = outputs
        self._states = states
        self._sorts_rows = sorts_rows
        self.time = DeviceTime()
        self._done: Event | None = None  # end of the last queued step; None after an idle period
        self._sampler = kernels.sampler(device, config.vocab_size)
        num_groups, max_rows = len(pool.groups), config.max_samples + 1
        self.table = DeviceTable(
            device,
            num_groups,
            config.num_rows,
            config.max_row_blocks,
            pool.trash_block,
            kernels.sample,
        )
        self.inputs = InputRing(
            device,
            input_bytes(num_groups, max_rows, config.max_batch_tokens, MAX_CHANGES),
            num_groups,
            self.table.padding_row,
            pool.trash_block * pool.block_size,
        )
        logits_dtype = getattr(torch, config.dtype)
        self._fixed = PaddedStep(
            device, forward, self.table, outputs, max_rows, config.vocab_size, logits_dtype, states
        )
        self.graphs = GraphCache(
            device,
            GraphPolicy(config.num_rows, config.max_cached_graphs, _mixed_shapes(config)),
            self._fixed,
            self.inputs,
            pool.block_size,
            self._buffers,
            mode=config.cuda_graphs,
            checks_addresses=config.check_graphs,
            off_because=_SORTS_ROWS if sorts_rows else None,
        )

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Current tensors that captured steps read and write, by name."""
        return {
            "the step's inputs": self.inputs.inputs,
            "block tables": self.table.blocks,
            "sampling limits": self.table.limits,
            "last tokens": self._outputs.last_token,
            **({} if self._states is None else {"recurrent states": self._states.data}),
            **self._fixed.buffers(),
            **self._pool.buffers(),
            **self._forward.buffers(),
        }

    def begin(self) -> None:
        """Does nothing: no work of this engine competes with a step."""

    def forward(self, plan: StepPlan, in_flight: InFlight) -> Sample:
        """See `DeviceSteps.forward`."""
        if self._sorts_rows:
            return self._queue_ragged(plan, in_flight)
        is_decode = plan.num_decode_rows == plan.num_rows and not plan.copies
        is_plain = plan.sampling.is_plain and not plan.awaits_tokens
        part = GraphPart.WHOLE if is_plain else GraphPart.FORWARD
        if is_decode:
            return self._queue_decode(plan, in_flight, part)
        if (graph := self._find_mixed(plan, part)) is not None:
            return self._queue_mixed(plan, in_flight, graph)
        return self._queue_ragged(plan, in_flight)

    def end(self, in_flight: InFlight) -> None:
        """See `DeviceSteps.end`."""
        done = in_flight.done = self._device.record(Stream.COMPUTE, "step done", timed=True)
        in_flight.done_before, self._done = self._done, done
        self.inputs.release(done)
        self._outputs.send(in_flight.slot, done)

    def note(self, in_flight: InFlight) -> None:
        """See `DeviceSteps.note`."""
        between, before = self._device.seconds_between, in_flight.done_before
        begun, done = in_flight.begun, in_flight.done
        forward_done, sampling_begun = in_flight.forward_done, in_flight.sampling_begun
        assert begun is not None and done is not None
        self.time.add(
            between(begun, done),
            None if before is None else between(before, begun),
            None
            if forward_done is None or sampling_begun is None
            else between(forward_done, sampling_begun),
        )

    def run_largest(
        self, run: Callable[[StepPlan], StepResult], plans: TrashPlans
    ) -> dict[int, float]:
        """See `DeviceSteps.run_largest`; adds a step that uses every kernel of the sampler."""
        config = self._config
        budget = config.max_batch_tokens
        rows = min(config.max_running_requests, budget)
        chunk = min(budget, config.max_model_len)
        mixed = [1] * min(rows, budget - chunk // 2) + [chunk // 2]
        seconds: dict[int, float] = {}
        for lengths in ([1], [1] * rows, [chunk], mixed):
            for temperature in (0.0, 1.0):
                plan = plans.plan([n for n in lengths if n > 0], temperature)
                began_s = time.perf_counter()
                run(plan)
                took_s = time.perf_counter() - began_s
                if len(lengths) == 1:
                    seconds[lengths[0]] = min(took_s, seconds.get(lengths[0], took_s))
        run(plans.special_plan(rows))
        return seconds

    def end_warm_up(self) -> None:
        """Capture the first graphs and reset the counters."""
        self.graphs.capture_first()
        self._fall_idle()
        self.time = DeviceTime()

    def use_idle(self) -> bool:
        """Capture one graph that steps have missed often enough, if any."""
        self._fall_idle()
        return self.graphs.use_idle()

    def close(self) -> None:
        """Does nothing: there is no background work."""

    def _fall_idle(self) -> None:
        """Mark the engine as idle, so that the time until the next step does not count as a gap."""
        self._done = None

    def telemetry(self) -> dict[str, object]:
        """See `DeviceSteps.telemetry`."""
        policy = self.graphs.policy
        return {
            "device": self.time.to_dict(),
            "graphs": {
                "off_because": self.graphs.off_because,
                "num_cached": len(self.graphs),
                "num_captures": self.graphs.num_captures,
                **policy.decodes.to_dict(),  # steps in which every row decodes; padding in rows
                "mixed": policy.mixed.to_dict(),  # padding in tokens
            },
            "uploads": {"num_copies": self.inputs.num_copies, "num_bytes": self.inputs.num_bytes},
            "downloads": {
                "num_copies": self._outputs.num_copies,
                "num_bytes": self._outputs.num_bytes,
            },
        }

    def hold(self, in_flight: InFlight) -> None:
        """See `DeviceSteps.hold`."""
        in_flight.forward_done = self._device.record(Stream.COMPUTE, "logits", timed=True)

    def begin_sampling(self, in_flight: InFlight) -> None:
        """See `DeviceSteps.begin_sampling`."""
        in_flight.sampling_begun = self._device.record(
            Stream.COMPUTE, "sampling begins", timed=True
        )

    def _begin(self, in_flight: InFlight) -> None:
        """Record the start of a step, after the upload of its inputs is queued."""
        in_flight.begun = self._device.record(Stream.COMPUTE, "step begins", timed=True)

    def logits(self, plan: StepPlan) -> torch.Tensor:
        """See `DeviceSteps.logits`."""
        plan, inputs, new = self._stage(plan)
        logits: list[torch.Tensor] = []

        def compute() -> None:
            self.table.apply(new)
            tables = self.table.tables(inputs.rows, plan.block_tables.width)
            logits.append(self._ragged.logits(plan, inputs, tables).float())

        self._device.run(Stream.COMPUTE, compute, name="forward", reads=(*inputs, *new))
        self._device.synchronize()
        return logits[0]

    # -- any step ----------------------------------------------------------------------------------------

    def _stage(self, plan: StepPlan) -> tuple[StepPlan, StepInputs, Differences]:
        has_limits = len(plan.rows) > 0
        plan = plan if has_limits else self.table.adopt(plan)
        new = self._differences(plan)
        sampling = plan.sampling
        if has_limits:
            keys = self.table.noise_keys(sampling.rows, sampling.position)
        else:
            keys = np.zeros(len(sampling.token_index), np.int64)  # never read
        return plan, *self.inputs.send(plan, keys, new)

    def _differences(self, plan: StepPlan) -> Differences:
        """Return at most `MAX_CHANGES` table changes for the step's upload, after uploading and applying the others."""
        *before, last = pieces(self.table.differences(plan.changes), MAX_CHANGES)
        for piece in before:
            new = self.inputs.send_differences(piece)
            self._apply(new)
            self.inputs.release(self._device.record(Stream.COMPUTE, "differences applied"))
        return last

    def _apply(self, new: Differences) -> None:
        if len(new.at) or len(new.rows):
            work = partial(self.table.apply, new)
            self._device.run(Stream.COMPUTE, work, name="differences", reads=new)

    def _queue_ragged(self, plan: StepPlan, in_flight: InFlight) -> Sample:
        has_limits = len(plan.sampling.rows) == len(plan.sampling.token_index)
        plan, inputs, new = self._stage(plan)
        self._begin(in_flight)
        logits: list[torch.Tensor] = []

        def compute() -> None:
            self.table.apply(new)
            tables = self.table.tables(inputs.rows, plan.block_tables.width)
            logits.append(self._ragged.logits(plan, inputs, tables, in_flight))

        self._device.run(Stream.COMPUTE, compute, name=f"step {plan.step}", reads=(*inputs, *new))
        return self._sample(plan, in_flight, logits.pop, inputs, has_limits)

    def _sample(
        self,
        plan: StepPlan,
        in_flight: InFlight,
        logits: Callable[[], torch.Tensor],
        inputs: FixedInputs,
        has_limits: bool = True,
    ) -> Sample:
        """Return the function that queues the sampling of a step.

        Parameters
        ----------
        logits
            Called when the sampling runs on the stream; returns [S or more, vocab].
        has_limits
            Whether the request table has the sampling options of the rows; otherwise the plan gives them and the noise.
        """
        count, slot, sampler = len(plan.sampling.token_index), in_flight.slot, self._sampler
        rows, choose, noise_keys = sampling_rows(inputs)[:count], None, None
        if has_limits:
            noise_keys = inputs.noise_keys[:count]
            choose = partial(self.table.choose, rows=rows, noise_keys=noise_keys)

        def queue(sampling: SamplingBatch, masks: Masks) -> None:
            staged = None
            if sampler is not None and not (sampling.is_plain and choose is not None):
                staged = sampler.stage(sampling, masks, has_limits=choose is not None)

            def compute() -> None:
                if staged is None:
                    self._ragged.sample_and_keep(
                        logits()[:count], inputs, sampling, in_flight, masks, choose
                    )
                    return
                limits = None if noise_keys is None else self.table.limits.index_select(0, rows)
                assert sampler is not None
                tokens = sampler.sample(logits()[:count], staged, limits, noise_keys, slot.scores)
                self._outputs.keep(slot, tokens, inputs)

            self._device.run(
                Stream.COMPUTE,
                compute,
                name=f"sampling of step {plan.step}",
                reads=inputs,
                writes=(slot.tokens, slot.scores),
            )
            if sampler is not None and staged is not None:
                sampler.queued()

        return queue

    # -- steps on fixed addresses ------------------------------------------------------------------------

    def _queue_decode(self, plan: StepPlan, in_flight: InFlight, part: GraphPart) -> Sample:
        """Queue a step in which every row decodes."""
        graph = self.graphs.find(plan.num_rows, part, is_adapted=len(plan.adapters) > 0)
        num_rows = plan.num_rows if graph is None else graph.key.num_rows
        keys = self.table.noise_keys(plan.rows, plan.kv_len)
        inputs, new = self.inputs.send_decode(plan, num_rows, keys, self._differences(plan))
        self._begin(in_flight)
        self._apply(new)
        self._copy_states(plan.state_copies)
        if graph is not None:
            self.graphs.replay(graph)
            self._copy_states(_ends(plan))
            return self._sample_fixed(plan, in_flight, inputs, part, lambda: self._fixed.logits)
        logits: list[torch.Tensor] = []
        work: Work = partial(self._fixed.whole, inputs)
        written: Tensors = (self._fixed.sampled[:num_rows],)
        if part is not GraphPart.WHOLE:
            work, written = lambda: logits.append(self._fixed.compute_logits(inputs)), ()
        self._device.run(
            Stream.COMPUTE, work, name=f"step {plan.step}", reads=inputs, writes=written
        )
        self._copy_states(_ends(plan))
        return self._sample_fixed(plan, in_flight, inputs, part, logits.pop)

    def _copy_states(self, pairs: np.ndarray) -> None:
        """Queue copies of slots of states, [k, 2] (from, to)."""
        if self._states is not None and len(pairs):
            work = partial(self._states.copy, pairs)
            self._device.run(Stream.COMPUTE, work, name="copies of states")

    def _find_mixed(self, plan: StepPlan, part: GraphPart) -> CachedGraph | None:
        has_rows = len(plan.rows) and len(plan.sampling.rows) == len(plan.sampling.token_index)
        # A graph takes no snapshots inside of a row.
        if plan.copies or plan.prompts or plan.pooling or len(plan.state_saves) or not has_rows:
            return None
        # The graph has a sample for each of its rows; one row more than the step's is padding.
        num_rows = max(plan.num_rows, len(plan.sampling.rows) - 1)
        return self.graphs.find_mixed(
            num_rows,
            plan.num_tokens,
            int(plan.kv_len.max()),
            part,
            is_adapted=len(plan.adapters) > 0,
        )

    def _queue_mixed(self, plan: StepPlan, in_flight: InFlight, graph: CachedGraph) -> Sample:
        new = self._differences(plan)  # first, because it computes the noise keys of new rows
        keys = self.table.noise_keys(plan.sampling.rows, plan.sampling.position)
        inputs, new = self.inputs.send_mixed(plan, graph.key, keys, new)
        self._begin(in_flight)
        self._apply(new)
        self._copy_states(plan.state_copies)
        self.graphs.replay(graph)
        part = graph.key.part
        return self._sample_fixed(plan, in_flight, inputs, part, lambda: self._fixed.logits)

    def _sample_fixed(
        self,
        plan: StepPlan,
        in_flight: InFlight,
        inputs: FixedInputs,
        part: GraphPart,
        logits: Callable[[], torch.Tensor],
    ) -> Sample:
        """Return the function that queues the sampling; if the graph has sampled, it only copies the tokens."""
        if part is GraphPart.WHOLE:
            return lambda sampling, masks: self._keep_sampled(plan, in_flight, inputs)
        return self._sample(plan, in_flight, logits, inputs)

    def _keep_sampled(self, plan: StepPlan, in_flight: InFlight, inputs: FixedInputs) -> None:
        """Copy the sampled tokens to the slot, because the next step overwrites them.

        The graph has kept any sample of a row with a draft; the last one that counts replaces it.
        """
        count, slot = len(plan.sampling.token_index), in_flight.slot
        sampled = self._fixed.sampled[:count]
        work: Work = partial(slot.tokens[:count].copy_, sampled)
        reads: Tensors = (sampled,)
        if plan.sampling.drafts is not None:
            work, reads = partial(self._outputs.keep, slot, sampled, inputs), (sampled, *inputs)
        self._device.run(
            Stream.COMPUTE,
            work,
            name=f"tokens of step {plan.step}",
            reads=reads,
            writes=(slot.tokens,),
        )


def _ends(plan: StepPlan) -> np.ndarray:
    """Snapshots of a step in which every row decodes, as copies of its rows' slots after the step: [k, 2] int64."""
    saves = plan.state_saves
    return np.stack([plan.rows[saves[:, 0]], saves[:, 2]], axis=1).astype(np.int64)


def _mixed_shapes(config: EngineConfig) -> MixedShapes | None:
    if config.q_padding is None:
        return None
    return MixedShapes(
        max_rows=config.num_rows,
        max_tokens=config.max_batch_tokens,
        max_kv_tokens=config.max_row_blocks * config.block_size,
        q_padding=config.q_padding,
        kv_padding=config.kv_padding,
    )
