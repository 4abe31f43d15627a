"""Steps on a device that queues its work: what travels to it, and what of a step runs as a graph.

```
 every row decodes,     [ differences ][ replay: last tokens ▸ model ▸ draw ][ keep ]            plain rows
 or mixed and padded    [ differences ][ replay: last tokens ▸ model ][ masks ▸ draw ▸ keep ]    others
 any other step         [ differences ▸ copies ▸ model ▸ draw ▸ keep ]
```

`[ ]` is one piece of work on the compute stream. Without a graph for it a step runs kernel by kernel, unpadded. Copies
of blocks (forks) and log-probabilities of prompts are not for graphs.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from quire.kernels.paged_attention import Backend
from quire.replica.config import EngineConfig
from quire.replica.device import Device, Event, Stream
from quire.replica.device_table import DeviceTable, Differences
from quire.replica.fixed_step import FixedInputs, FixedStep, sampling_rows
from quire.replica.forward import Forward
from quire.replica.graph_cache import CachedGraph, GraphCache
from quire.replica.graph_key import GraphPart
from quire.replica.graph_shelf import GraphShelf
from quire.replica.kv_pool import KVPool
from quire.replica.mixed_shapes import MixedShapes
from quire.replica.plan import StepPlan
from quire.replica.ragged_step import RaggedStep
from quire.replica.step_inputs import InputRing, StepInputs, input_bytes, pieces
from quire.replica.step_outputs import InFlight, StepOutputs
from quire.replica.step_sampler import Masks
from quire.replica.telemetry import DeviceTime

# Entries of block tables that travel with one upload: more come in several.
MAX_CHANGES = 8192


class QueuedSteps:
    """Queues steps; owns the device's inputs, request table and graphs.

    Parameters
    ----------
    forward, ragged, outputs
        Of the runner.
    pool
        KV; its trash block takes what padding writes.
    backend
        Of the attention; the tokens are drawn by the same.

    Raises
    ------
    ValueError
        Graphs are asked for where the device has none, or `q_padding` is out of its bounds.
    """

    def __init__(
        self,
        config: EngineConfig,
        device: Device,
        pool: KVPool,
        forward: Forward,
        ragged: RaggedStep,
        outputs: StepOutputs,
        backend: Backend,
    ):
        self._device = device
        self._pool = pool
        self._forward = forward
        self._ragged = ragged
        self._outputs = outputs
        self.time = DeviceTime()
        self._done: Event | None = None  # of the step queued last, unless the engine fell idle
        num_groups, max_rows = len(pool.groups), config.num_rows + 1
        self.table = DeviceTable(
            device, num_groups, config.num_rows, config.max_row_blocks, pool.trash_block, backend
        )
        self.inputs = InputRing(
            device,
            input_bytes(num_groups, max_rows, config.max_batch_tokens, MAX_CHANGES),
            num_groups,
            self.table.padding_row,
            pool.trash_block * pool.block_size,
        )
        logits_dtype = getattr(torch, config.dtype)
        self._fixed = FixedStep(
            device, forward, self.table, outputs, max_rows, config.vocab_size, logits_dtype
        )
        self.graphs = GraphCache(
            device,
            GraphShelf(config.num_rows, config.max_cached_graphs, _mixed_shapes(config)),
            self._fixed,
            self.inputs,
            pool.block_size,
            self._buffers,
            mode=config.cuda_graphs,
            checks_addresses=config.check_graphs,
        )

    def _buffers(self) -> dict[str, torch.Tensor]:
        """What captured steps read and write, as it is now."""
        buffers = {
            "the step's inputs": self.inputs.inputs,
            "block tables": self.table.blocks,
            "sampling columns": self.table.columns,
            "last tokens": self._outputs.last_token,
            "sampled tokens": self._fixed.sampled,
            "the KV pool": self._pool.data,
            **self._forward.weights(),
        }
        if self._fixed.logits is not None:
            buffers["logits"] = self._fixed.logits
        return buffers

    def launch(self, plan: StepPlan, in_flight: InFlight, masks: Masks) -> None:
        """Queue a step and the copy of its tokens to the host."""
        device, slot = self._device, in_flight.slot
        is_decode = len(plan.decode_rows) == plan.num_rows and not plan.copies
        part = GraphPart.WHOLE if plan.sampling.is_plain else GraphPart.FORWARD
        if is_decode:
            self._queue_decode(plan, in_flight, masks, self.graphs.find(plan.num_rows, part))
        elif (graph := self._find_mixed(plan, part)) is not None:
            self._queue_mixed(plan, in_flight, masks, graph)
        else:
            self._queue_ragged(plan, in_flight, masks)
        done = in_flight.done = device.record(Stream.COMPUTE, "step done", timed=True)
        in_flight.done_before, self._done = self._done, done
        self.inputs.release(done)
        self._outputs.send(slot, done)

    def note(self, in_flight: InFlight) -> None:
        """A step is over: add its times."""
        between, before = self._device.seconds_between, in_flight.done_before
        self.time.add(
            between(in_flight.begun, in_flight.done),
            None if before is None else between(before, in_flight.begun),
        )

    def fall_idle(self) -> None:
        """No step will follow soon: what passes until then is no gap."""
        self._done = None

    def telemetry(self) -> dict[str, object]:
        """Counters since the start."""
        shelf = self.graphs.shelf
        return {
            "device": self.time.to_dict(),
            "graphs": {
                "off_because": self.graphs.off_because,
                "num_cached": len(self.graphs),
                "num_captures": self.graphs.num_captures,
                **shelf.decodes.to_dict(),  # of steps in which every row decodes; padding: of the rows
                "mixed": shelf.mixed.to_dict(),  # padding: of the tokens
            },
            "uploads": {"num_copies": self.inputs.num_copies, "num_bytes": self.inputs.num_bytes},
        }

    def _begin(self, in_flight: InFlight) -> None:
        """Its inputs have been sent for: from here on the device is busy with the step."""
        in_flight.begun = self._device.record(Stream.COMPUTE, "step begins", timed=True)

    def forward(self, plan: StepPlan) -> torch.Tensor:
        """Write the step's KV; the logits of the rows that sample, [S, vocab] float32."""
        plan, inputs, new = self._stage(plan)
        logits: list[torch.Tensor] = []

        def compute() -> None:
            self.table.apply(new)
            tables = self.table.tables(inputs.rows, plan.block_tables.shape[2])
            logits.append(self._ragged.logits(plan, inputs, tables).float())

        self._device.run(Stream.COMPUTE, compute, name="forward", reads=(*inputs, *new))
        self.inputs.release(self._device.record(Stream.COMPUTE, "step done"))
        self._device.synchronize()
        return logits[0]

    # -- any step ----------------------------------------------------------------------------------------

    def _stage(self, plan: StepPlan) -> tuple[StepPlan, StepInputs, Differences]:
        has_columns = len(plan.rows) > 0
        plan = plan if has_columns else self.table.adopt(plan)
        new = self._differences(plan)
        sampling = plan.sampling
        if has_columns:
            keys = self.table.noise_keys(sampling.rows, sampling.position)
        else:
            keys = np.zeros(len(sampling.token_index), np.int64)  # nobody reads them
        return plan, *self.inputs.send(plan, keys, new)

    def _differences(self, plan: StepPlan) -> Differences:
        """What travels with the step; what is too much for that is on its way already."""
        *before, last = pieces(self.table.differences(plan.changes), MAX_CHANGES)
        for piece in before:
            new = self.inputs.send_differences(piece)
            self._apply(new)
            self.inputs.release(self._device.record(Stream.COMPUTE, "step done"))
        return last

    def _apply(self, new: Differences) -> None:
        if len(new.at) or len(new.rows):
            work = partial(self.table.apply, new)
            self._device.run(Stream.COMPUTE, work, name="differences", reads=new)

    def _queue_ragged(self, plan: StepPlan, in_flight: InFlight, masks: Masks) -> None:
        has_columns = len(plan.sampling.rows) == len(plan.sampling.token_index)
        plan, inputs, new = self._stage(plan)
        self._begin(in_flight)

        choose = None
        if has_columns:
            choose = partial(
                self.table.choose, rows=inputs.sample_rows, noise_keys=inputs.noise_keys
            )

        def compute() -> None:
            self.table.apply(new)
            tables = self.table.tables(inputs.rows, plan.block_tables.shape[2])
            self._ragged.whole(plan, inputs, tables, in_flight, masks, choose)

        self._device.run(
            Stream.COMPUTE,
            compute,
            name=f"step {plan.step}",
            reads=(*inputs, *new),
            writes=(in_flight.slot.tokens,),
        )

    # -- steps on fixed addresses ------------------------------------------------------------------------

    def _queue_decode(
        self, plan: StepPlan, in_flight: InFlight, masks: Masks, graph: CachedGraph | None
    ) -> None:
        """A step in which every row decodes."""
        num_rows = plan.num_rows if graph is None else graph.key.num_rows
        keys = self.table.noise_keys(plan.rows, plan.kv_len)
        inputs, new = self.inputs.send_decode(plan, num_rows, keys, self._differences(plan))
        self._begin(in_flight)
        self._apply(new)
        if graph is not None:
            self.graphs.replay(graph)
        elif plan.sampling.is_plain:
            self._device.run(
                Stream.COMPUTE,
                partial(self._fixed.whole, inputs),
                name=f"step {plan.step}",
                reads=inputs,
                writes=(self._fixed.sampled[:num_rows],),
            )
        self._queue_tokens(plan, inputs, in_flight, masks, is_computed=graph is not None)

    def _find_mixed(self, plan: StepPlan, part: GraphPart) -> CachedGraph | None:
        has_rows = len(plan.rows) and len(plan.sampling.rows) == len(plan.sampling.token_index)
        if plan.copies or plan.prompts or not has_rows:
            return None
        return self.graphs.find_mixed(plan.num_rows, plan.num_tokens, int(plan.kv_len.max()), part)

    def _queue_mixed(
        self, plan: StepPlan, in_flight: InFlight, masks: Masks, graph: CachedGraph
    ) -> None:
        new = self._differences(plan)  # first: the keys of rows that begin are among them
        keys = self.table.noise_keys(plan.sampling.rows, plan.sampling.position)
        inputs, new = self.inputs.send_mixed(plan, graph.key, keys, new)
        self._begin(in_flight)
        self._apply(new)
        self.graphs.replay(graph)
        self._queue_tokens(plan, inputs, in_flight, masks, is_computed=True)

    def _queue_tokens(
        self,
        plan: StepPlan,
        inputs: FixedInputs,
        in_flight: InFlight,
        masks: Masks,
        *,
        is_computed: bool,
    ) -> None:
        """To the step's slot: what has been sampled, or is now.

        Parameters
        ----------
        is_computed
            If the host has a say in what is drawn: the logits are there.
        """
        if plan.sampling.is_plain:
            self._keep_sampled(plan, in_flight)
        else:
            self._draw_and_keep(plan, inputs, in_flight, masks, is_computed=is_computed)

    def _keep_sampled(self, plan: StepPlan, in_flight: InFlight) -> None:
        """The next step overwrites what was sampled, before the host has it."""
        count, slot = len(plan.sampling.token_index), in_flight.slot
        sampled = self._fixed.sampled[:count]
        self._device.run(
            Stream.COMPUTE,
            lambda: slot.tokens[:count].copy_(sampled),
            name=f"tokens of step {plan.step}",
            reads=(sampled,),
            writes=(slot.tokens,),
        )

    def _draw_and_keep(
        self,
        plan: StepPlan,
        inputs: FixedInputs,
        in_flight: InFlight,
        masks: Masks,
        *,
        is_computed: bool,
    ) -> None:
        """Draw with the host's masks and penalties, from logits that a graph has computed, or compute them."""
        count = len(plan.sampling.token_index)

        def compute() -> None:
            logits = self._fixed.logits if is_computed else self._fixed.compute_logits(inputs)
            rows = sampling_rows(inputs)[:count]
            keys = inputs.noise_keys[:count]
            choose = partial(self.table.choose, rows=rows, noise_keys=keys)
            tokens = self._ragged.draw(logits[:count], plan.sampling, in_flight, masks, choose)
            self._outputs.keep(in_flight.slot, tokens, rows)

        self._device.run(
            Stream.COMPUTE,
            compute,
            name=f"step {plan.step}",
            reads=inputs,
            writes=(in_flight.slot.tokens,),
        )


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
