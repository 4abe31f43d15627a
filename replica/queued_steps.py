"""Steps on a device that queues its work: what travels to it, and what of a step runs as a graph.

```
 every row decodes      [ differences ][ replay: last tokens ▸ model ▸ draw ][ keep ]            plain rows
                        [ differences ][ replay: last tokens ▸ model ][ masks ▸ draw ▸ keep ]    others
 any other step         [ differences ▸ copies ▸ model ▸ draw ▸ keep ]
```

`[ ]` is one piece of work on the compute stream. Without a graph for it a decode runs kernel by kernel, unpadded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from quire.kernels.paged_attention import Backend
from quire.replica.config import EngineConfig
from quire.replica.decode_step import DecodeStep
from quire.replica.device import Device, Event, Stream
from quire.replica.device_table import DeviceTable, Differences
from quire.replica.forward import Forward
from quire.replica.graph_cache import GraphCache
from quire.replica.graph_shelf import GraphPart, GraphShelf
from quire.replica.kv_pool import KVPool
from quire.replica.plan import StepPlan
from quire.replica.step_inputs import DecodeInputs, InputRing, StepInputs, input_bytes, pieces
from quire.replica.step_outputs import InFlight, StepOutputs
from quire.replica.step_sampler import Masks, StepSampler
from quire.replica.telemetry import DeviceTime

# Entries of block tables that travel with one upload: more come in several.
MAX_CHANGES = 8192


class QueuedSteps:
    """Queues steps; owns the device's inputs, request table and graphs.

    Parameters
    ----------
    forward, sampler, outputs
        Of the runner.
    pool
        KV; its trash block takes what padding writes.
    backend
        Of the attention; the tokens are drawn by the same.

    Raises
    ------
    ValueError
        Graphs are asked for where the device has none.
    """

    def __init__(
        self,
        config: EngineConfig,
        device: Device,
        pool: KVPool,
        forward: Forward,
        sampler: StepSampler,
        outputs: StepOutputs,
        backend: Backend,
    ):
        self._device = device
        self._pool = pool
        self._forward = forward
        self._sampler = sampler
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
        self._decode = DecodeStep(
            device, forward, self.table, outputs, max_rows, config.vocab_size, logits_dtype
        )
        self.graphs = GraphCache(
            device,
            GraphShelf(config.num_rows, config.max_cached_graphs),
            self._decode,
            self.inputs,
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
            "sampled tokens": self._decode.sampled,
            "the KV pool": self._pool.data,
            **self._forward.weights(),
        }
        if self._decode.logits is not None:
            buffers["logits"] = self._decode.logits
        return buffers

    def launch(self, plan: StepPlan, in_flight: InFlight, masks: Masks) -> None:
        """Queue a step and the copy of its tokens to the host."""
        device, slot = self._device, in_flight.slot
        is_decode = len(plan.decode_rows) == plan.num_rows and not plan.copies
        queue = self._queue_decode if is_decode else self._queue_ragged
        queue(plan, in_flight, masks)
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
        computed = shelf.num_rows + shelf.num_padding_rows
        return {
            "device": self.time.to_dict(),
            "graphs": {
                "off_because": self.graphs.off_because,
                "num_cached": len(self.graphs),
                "num_captures": self.graphs.num_captures,
                "num_hits": shelf.num_hits,
                "num_misses": shelf.num_misses,
                "padding": shelf.num_padding_rows / max(computed, 1),  # of the rows computed
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
            hidden = self._hidden(plan, inputs)
            logits.append(self._forward.float_logits(hidden[inputs.token_index]))

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

        def compute() -> None:
            self.table.apply(new)
            self._pool.copy_blocks(plan.copies)
            self._outputs.fill_in(inputs.token_ids, inputs.decode_rows)
            hidden = self._hidden(plan, inputs)
            in_flight.prompts = self._forward.score_prompts(hidden, plan.prompts)
            logits = self._forward.logits(hidden[inputs.token_index])
            choose = None
            if has_columns:
                choose = partial(
                    self.table.choose, rows=inputs.sample_rows, noise_keys=inputs.noise_keys
                )
            tokens = self._draw(logits, plan, in_flight, masks, choose)
            self._outputs.keep(in_flight.slot, tokens, inputs.sample_rows)

        self._device.run(
            Stream.COMPUTE,
            compute,
            name=f"step {plan.step}",
            reads=(*inputs, *new),
            writes=(in_flight.slot.tokens,),
        )

    def _hidden(self, plan: StepPlan, inputs: StepInputs) -> torch.Tensor:
        return self._forward.hidden(
            inputs.token_ids,
            inputs.positions,
            inputs.cu_q,
            inputs.kv_len,
            self.table.tables(inputs.rows, plan.block_tables.shape[2]),
            inputs.slots,
            np.diff(plan.cu_q),
        )

    def _draw(
        self,
        logits: torch.Tensor,
        plan: StepPlan,
        in_flight: InFlight,
        masks: Masks,
        choose: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> torch.Tensor:
        """[S, vocab] logits of the model's type to [S] int64 tokens."""
        if choose is not None and plan.sampling.is_plain:
            return choose(logits)
        tokens, in_flight.logprobs = self._sampler.sample(
            logits.float(), plan.sampling, masks, choose
        )
        return tokens

    # -- steps in which every row decodes ----------------------------------------------------------------

    def _queue_decode(self, plan: StepPlan, in_flight: InFlight, masks: Masks) -> None:
        is_plain = plan.sampling.is_plain
        part = GraphPart.WHOLE if is_plain else GraphPart.FORWARD
        graph = self.graphs.find(plan.num_rows, part)
        num_rows = plan.num_rows if graph is None else graph.key.num_rows
        keys = self.table.noise_keys(plan.rows, plan.kv_len)
        inputs, new = self.inputs.send_decode(plan, num_rows, keys, self._differences(plan))
        self._begin(in_flight)
        self._apply(new)
        if graph is not None:
            self.graphs.replay(graph)
        elif is_plain:
            self._device.run(
                Stream.COMPUTE,
                partial(self._decode.whole, inputs),
                name=f"step {plan.step}",
                reads=inputs,
                writes=(self._decode.sampled[:num_rows],),
            )
        if is_plain:
            self._keep_sampled(plan, in_flight)
        else:
            self._draw_and_keep(plan, inputs, in_flight, masks, is_computed=graph is not None)

    def _keep_sampled(self, plan: StepPlan, in_flight: InFlight) -> None:
        """The next step overwrites what was sampled, before the host has it."""
        count, slot = plan.num_rows, in_flight.slot
        sampled = self._decode.sampled[:count]
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
        inputs: DecodeInputs,
        in_flight: InFlight,
        masks: Masks,
        *,
        is_computed: bool,
    ) -> None:
        """Draw with the host's masks and penalties, from logits that a graph has computed, or compute them."""
        count = plan.num_rows

        def compute() -> None:
            logits = self._decode.logits if is_computed else self._decode.compute_logits(inputs)
            rows = inputs.rows[:count]
            keys = inputs.noise_keys[:count]
            choose = partial(self.table.choose, rows=rows, noise_keys=keys)
            tokens = self._draw(logits[:count], plan, in_flight, masks, choose)
            self._outputs.keep(in_flight.slot, tokens, rows)

        self._device.run(
            Stream.COMPUTE,
            compute,
            name=f"step {plan.step}",
            reads=inputs,
            writes=(in_flight.slot.tokens,),
        )
