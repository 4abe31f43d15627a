"""The runner executes step plans on one device. It owns the model and the contents of the KV pools.

```
 plan ──▶ launch: block copies, KV write + attention per layer, lm_head on the rows that sample, sampler ──▶ InFlight
                                                                                                      │
 StepResult ◀── collect: tokens to the host ◀─────────────────────────────────────────────────────────┘
```

On the CPU, `launch` computes the step and `collect` does not wait. On a GPU, `launch` queues device operations on four
streams and returns. Step N+1 may be launched while step N runs: it reads the tokens that N samples on the device.

```
 host     plan N+1 ▸ stage ▸ launch        collect N (sleeps) ▸ commit N ▸ plan N+2 ...
 h2d                 [inputs of N+1] after "step done" N
 offload             [blocks of N+1 ....................]     step N does not use them: `deferred_frees.py`
 compute  [ step N ......................] after both [ step N+1 .....................
 d2h                                      [tokens of N] after "step done" N
```
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from quire.kernels.attention.paged_attention import Backend, PagedAttention
from quire.replica.adapters.adapted_model import AdaptedModel
from quire.replica.checkpoint.model_spec import ModelSpec
from quire.replica.config import EngineConfig
from quire.replica.core.adapter import AdapterLoad
from quire.replica.core.step_plan import CopiesDone, SamplingBatch, StepPlan, StepResult
from quire.replica.core.warmup_plans import TrashPlans
from quire.replica.device.compile_count import CompileCount
from quire.replica.device.device import Device
from quire.replica.device.host_pool import HostPool
from quire.replica.device.kv_pool import KVPool
from quire.replica.device.open_device import open_device
from quire.replica.device.state_pool import StatePool
from quire.replica.kv_cache.groups import LayerGroup
from quire.replica.model.deterministic.cpu_row_check import NotDeterministicError
from quire.replica.model.fusion.fuse_report import FuseReport
from quire.replica.model.kv_scales import read_kv_scales
from quire.replica.model.layers.fixed_rope import fix_rope
from quire.replica.model.layers.linear_parts import name_linears
from quire.replica.model.layers.state_layers import split_state_layers
from quire.replica.model.loader import load_model
from quire.replica.model.output_head import split_model
from quire.replica.model.recurrence.recurrent_fusion import sorts_rows
from quire.replica.node_pool.pool_file import PoolSlots
from quire.replica.runner.cpu_steps import CpuSteps
from quire.replica.runner.device_steps import DeviceSteps
from quire.replica.runner.gpu_steps import GpuSteps
from quire.replica.runner.graphs.graph_cache import GraphCache
from quire.replica.runner.model_kernels import ModelKernels
from quire.replica.runner.ragged_step import RaggedStep
from quire.replica.runner.step_outputs import InFlight
from quire.replica.sampling.step_sampler import Masks, StepSampler

_NO_BLOCKS = np.empty(0, np.int64)

logger = logging.getLogger(__name__)


class Runner:
    """Runs step plans.

    Parameters
    ----------
    config
        The resolved options of the engine.
    spec
        Shape of the checkpoint.
    model
        Result of `load_model`. Modules are fused in place, and replaced if `deterministic` is set.
    pool
        KV cache of `config.num_blocks` blocks. The runner allocates the host tier of `config.num_host_blocks`.
    device
        Runs the work; None opens `config.device`.
    fused
        Report of the runner that has already fused this model; None: fuse it here.
    pool_slots
        The memory of the node's pool, in which the host tier is; None: the host tier is private.

    Raises
    ------
    ValueError
        `deterministic` is set and cannot be fulfilled for this model, dtype or machine.
    """

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        model: torch.nn.Module,
        pool: KVPool,
        *,
        attention_backend: Backend | None = None,
        device: Device | None = None,
        fused: FuseReport | None = None,
        pool_slots: PoolSlots | None = None,
    ):
        self.config = config
        self.spec = spec
        self.model = model
        self.pool = pool
        self._device = (
            open_device(config.device, use_nvtx=config.nvtx) if device is None else device
        )
        self.host_pool = HostPool(config.num_host_blocks, pool, self._device, pool_slots)
        self._sampler = StepSampler(config.vocab_size)
        self.kernels = _choose_kernels(config, attention_backend)
        # One row more than requests: the padding row.
        self._outputs = self.kernels.outputs(self._device, config.num_rows + 1, config.max_samples)
        self._busy_until_s = 0.0  # end of the last collected step
        self._compiles = CompileCount()
        fix_rope(model, config.max_model_len)
        self._attentions = [self._attention(group) for group in pool.groups if group.layers]
        self.states = _state_pool(config, spec, model, self._device, pool.data.device.type)
        if fused is None:
            name_linears(model)
            layout = () if self.states is None else self.states.layout
            recurrent = self.kernels.fuse_recurrences(config, model, layout)
            fused = self.kernels.fuse(config, model, pool, self._attentions).joined(recurrent)
        self.fused = fused
        if config.deterministic:
            if self.states is not None and sorts_rows(model):
                raise ValueError(
                    "deterministic is true, and modules of transformers compute recurrent layers, whose sums depend "
                    f"on the chunks of a prompt; use deterministic false ({'; '.join(fused.dropped) or 'fuse is off'})"
                )
            try:
                self.kernels.fix_order(model, pool, self._attentions)
            except NotDeterministicError as error:
                if not config.is_deterministic_by_default:
                    raise
                logger.warning("%s. It was not asked for, so it is false now", error)
                self.config = config = dataclasses.replace(config, deterministic=False)
        # None: the engine has no adapters.
        self.adapted: AdaptedModel | None = None
        if config.max_loaded_adapters:
            decoder, _ = split_model(model)
            dtype = getattr(torch, config.dtype)
            self.adapted = self.kernels.adapt(
                decoder, config.max_loaded_adapters, config.max_adapter_rank, dtype, self._device
            )
        self._forward = self.kernels.forward(
            model, pool, self._attentions, config.max_running_requests, self.adapted
        )
        ragged = RaggedStep(self._forward, self._sampler, self._outputs, pool, self.states)
        # Of two steps of the warm-up, by their tokens (`DeviceSteps.run_largest`).
        self.warm_step_s: dict[int, float] = {}
        self.trash_plans = TrashPlans(config, len(pool.groups), pool.trash_block)
        self.steps: DeviceSteps
        if self._device.is_immediate:
            self.steps = CpuSteps(config, self._device, pool, ragged, self._outputs)
        else:
            self.steps = GpuSteps(
                config,
                self._device,
                pool,
                self._forward,
                ragged,
                self._outputs,
                self.kernels,
                states=self.states,
                sorts_rows=self.states is not None and sorts_rows(model),
            )
        self._device.synchronize()  # the weights were not loaded on the compute stream

    def _attention(self, group: LayerGroup) -> PagedAttention:
        config, num_heads = self.config, group.num_heads or self.spec.num_heads
        return PagedAttention(
            self.pool.keys(group.layers[0]),
            num_heads,
            max_rows=config.max_running_requests + 1,
            max_len=config.max_model_len,
            window=group.window,
            chunk=group.chunk,
            share_prefixes=config.prefix_caching,
            uniform=config.deterministic,
            value_dim=group.value_size,
            values_in_keys=group.values_in_keys,
            dtype=getattr(torch, config.dtype),
            backend=self.kernels.backend,
            **self.kernels.attention_options(config, group, self.pool, num_heads),
        )

    @classmethod
    def from_config(cls, config: EngineConfig, spec: ModelSpec) -> Self:
        """Load the checkpoint of `spec`, and allocate the KV pool."""
        options = (config.device, config.dtype, config.weights)
        model = load_model(spec, *options, num_splits=config.reduction_splits)
        return cls.with_pool(config, spec, model)

    @classmethod
    def with_pool(
        cls, config: EngineConfig, spec: ModelSpec, model: torch.nn.Module, **options: Any
    ) -> Self:
        """Allocate the KV pool for a loaded model; `options` are those of the class."""
        pool = KVPool(
            config.num_blocks,
            spec.groups,
            config.block_size,
            getattr(torch, config.pool_dtype),
            config.device,
            read_kv_scales(spec) if config.kv_cache_dtype == "fp8" else None,
        )
        return cls(config, spec, model, pool, **options)

    def run(self, plan: StepPlan) -> StepResult:
        """Launch a step and collect its result."""
        return self.collect(self.launch(plan))

    def launch(self, plan: StepPlan) -> InFlight:
        """Start a step; on a GPU this returns before the step is done. The scheduler has checked the plan's bounds."""
        try:
            return self._launch(plan)
        except Exception:
            # No event marks the end of the operations already queued, and their blocks may be reused after this error.
            self._device.synchronize()
            raise

    def _launch(self, plan: StepPlan) -> InFlight:
        self.steps.begin()
        slot = self._outputs.take(len(plan.sampling.token_index))
        self._move_blocks(plan)
        # On a CPU the copies have ended here. They are no work of the step, from which its speed is estimated.
        in_flight = InFlight(slot, time.perf_counter())
        if plan.adapter_loads:
            self._load_adapters(plan.adapter_loads)
        # Start the masks before the forward pass, so that both run concurrently.
        masks = None if plan.awaits_tokens else self._sampler.begin(plan.sampling)
        in_flight.sample = self.steps.forward(plan, in_flight)
        if plan.awaits_tokens:
            self.steps.hold(in_flight)
        else:
            self._sample(in_flight, plan.sampling, masks)
        self.host_pool.move_rest()
        return in_flight

    def _move_blocks(self, plan: StepPlan) -> None:
        """Queue the copies between the tiers that must precede the step."""
        written = _NO_BLOCKS
        if len(plan.saves) or self.host_pool.is_saving:
            written = plan.written_blocks(self.config.block_size)
        self.host_pool.move(
            plan.saves,
            plan.restores,
            step=plan.step,
            written=written,
            used_now=plan.uses_restores,
        )

    @property
    def adapter_reader(self) -> Callable[[Path], Any] | None:
        """Reads an adapter's folder to host memory, for `Adapter.weights`; any thread may call it. None: no adapters.

        It raises InvalidRequest for an adapter that the engine cannot apply.
        """
        return None if self.adapted is None else self.adapted.read

    def _load_adapters(self, loads: Sequence[AdapterLoad]) -> None:
        assert self.adapted is not None
        self.adapted.load(loads)

    def sample(self, in_flight: InFlight, sampling: SamplingBatch) -> None:
        """Queue the sampling of a step that had to wait for the previous step's tokens.

        `sampling` is the result of `Scheduler.complete`: the options of the plan, completed with these tokens.
        """
        try:
            masks = self._sampler.begin(sampling)
            if masks is not None:
                masks.result()  # wait here, so that `hold_us` in the telemetry includes the masks
            self.steps.begin_sampling(in_flight)
            self._sample(in_flight, sampling, masks)
        except Exception:
            self._device.synchronize()  # queued operations may still use blocks, as in `launch`
            raise

    def _sample(self, in_flight: InFlight, sampling: SamplingBatch, masks: Masks) -> None:
        in_flight.slot.asked = sampling.logprobs
        assert in_flight.sample is not None
        in_flight.sample(sampling, masks)
        in_flight.sample = None
        self.steps.end(in_flight)

    def collect(self, in_flight: InFlight) -> StepResult:
        """Wait for a launched step and return its result.

        Raises
        ------
        RuntimeError
            The step needed tokens of the previous step, which failed, so it has sampled nothing.
        """
        if in_flight.sample is not None:
            self._device.synchronize()
            raise RuntimeError("the step has not sampled: the one before it failed")
        tokens = in_flight.slot.collect()
        self.steps.note(in_flight)
        logprobs = in_flight.slot.collect_scores()
        prompts = tuple(scores.to_host() for scores in in_flight.prompts)
        pooled = tuple(hidden_sum.cpu().numpy() for hidden_sum in in_flight.pooled)
        finished_s = in_flight.finished_s or time.perf_counter()
        # A step launched behind another one starts only when that one ends.
        duration_s = finished_s - max(in_flight.started_s, self._busy_until_s)
        self._busy_until_s = finished_s
        copies = self.host_pool.take_done()
        return StepResult(tokens, duration_s, logprobs, prompts, pooled, copies)

    def take_copies(self) -> CopiesDone:
        """Return which copies between the tiers have ended since the last call or result."""
        return self.host_pool.take_done()

    def save_blocks(self, pairs: np.ndarray) -> None:
        """Copy blocks to the host tier while no step is in flight."""
        self.host_pool.save_now(pairs)

    def forward(self, plan: StepPlan) -> torch.Tensor:
        """Write the step's KV and return the logits of the rows that sample: [S, vocab] float32."""
        return self.steps.logits(plan)

    @property
    def graphs(self) -> GraphCache | None:
        """Cache of captured steps; None on the CPU."""
        return self.steps.graphs

    def use_idle(self) -> bool:
        """Prepare for later steps while the engine is idle; return whether there was anything to do."""
        return self.steps.use_idle()

    def close(self) -> None:
        """End background work that `use_idle` has started."""
        self.steps.close()

    def telemetry(self) -> dict[str, object]:
        """Counters of device time, graphs and copies since the start."""
        return {**self.steps.telemetry(), "tiers": self.host_pool.telemetry()}

    def mark(self, name: str) -> AbstractContextManager[None]:
        """Return a context manager that marks a range of the engine's thread for a profiler."""
        return self._device.mark(name)

    def warm_up(self) -> None:
        """Run the shapes that serving will use, then capture graphs.

        Afterwards serving compiles no kernel and touches no memory for the first time.
        """
        self.warm_step_s = self.run_largest()
        if self.adapted is not None:
            # Shows which products can have adapters. Slot 1 is still empty.
            plan = self.trash_plans.plan([3, 1], 0.0)
            self.run(plan._replace(adapters=np.ones(2, np.int32)))
        if self.config.deterministic:
            self.kernels.warm_fixed_products(self.model, self.config.max_batch_tokens)
        self.steps.end_warm_up()

    def run_largest(self) -> dict[int, float]:
        """Run the largest steps; they write only to the trash block. Returns what `DeviceSteps.run_largest` does."""
        return self.steps.run_largest(self.run, self.trash_plans)

    def mark_ready(self) -> None:
        """Start counting `num_compiles`."""
        self._compiles.start()

    @property
    def num_compiles(self) -> int:
        """Graphs that torch.compile traced and kernels that Triton built in this process since `mark_ready`."""
        return self._compiles.num_compiles


def _state_pool(
    config: EngineConfig,
    spec: ModelSpec,
    model: torch.nn.Module,
    device: Device,
    memory: str,
) -> StatePool | None:
    """Allocate the states of a recurrent model: slots for the rows of the request table, and for snapshots."""
    if not spec.has_states:
        return None
    return StatePool(
        split_state_layers(model),
        config.num_rows,
        config.num_snapshots,
        config.num_host_snapshots,
        device=memory,
        pinned=device.pinned,
    )


def _choose_kernels(config: EngineConfig, backend: Backend | None) -> ModelKernels:
    """Create the kernels of a backend; None chooses by the configuration's device."""
    if backend is None:
        backend = "cpu" if config.device == "cpu" else "triton"
    if backend == "cpu":
        from quire.replica.runner.cpu_kernels import CpuKernels

        return CpuKernels(config.num_threads)
    from quire.replica.runner.gpu_kernels import GpuKernels

    return GpuKernels()
