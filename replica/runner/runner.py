"""The runner: executes step plans on one device. Owns the model and the KV pools' content, decides nothing.

```
 plan ──▶ launch: block copies, KV write + attention per layer, lm_head on the rows that sample, sampler ──▶ InFlight
                                                                                                      │
 StepResult ◀── collect: tokens to the host ◀─────────────────────────────────────────────────────────┘
```

On the CPU `launch` computes and `collect` has nothing to wait for. On a GPU `launch` queues work on four streams and
returns; step N+1 may be launched while step N runs, and gathers the tokens that N samples on the device:

```
 host     plan N+1 ▸ stage ▸ launch        collect N (sleeps) ▸ commit N ▸ plan N+2 ...
 h2d                 [inputs of N+1] after "step done" N
 offload             [blocks of N+1 ....................]     nobody uses them in N: `deferred_frees.py`
 compute  [ step N ......................] after both [ step N+1 .....................
 d2h                                      [tokens of N] after "step done" N
```
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import torch

from quire.kernels.attention.paged_attention import Backend, PagedAttention
from quire.kernels.cpu import cpu_attention_native, native_library
from quire.kernels.cpu.cpu_attention_torch import choose_query_tokens
from quire.kernels.cpu.cpu_call_sequence import Workspace
from quire.replica.checkpoint.model_spec import ModelSpec
from quire.replica.config import EngineConfig
from quire.replica.core.step_plan import (
    Penalties,
    PromptTargets,
    SamplingBatch,
    StepPlan,
    StepResult,
    TokenRules,
)
from quire.replica.device.device import Device, Stream
from quire.replica.device.host_pool import HostPool
from quire.replica.device.kv_pool import KVPool
from quire.replica.device.open_device import open_device
from quire.replica.device.pool_backing import PoolBacking
from quire.replica.device.telemetry import DeviceTime
from quire.replica.kv_cache.groups import LayerGroup
from quire.replica.model.deterministic.deterministic_linear import make_deterministic
from quire.replica.model.fusion.fuse_pass import FuseReport, fuse
from quire.replica.model.kv_scales import read_kv_scales
from quire.replica.model.loader import load_model
from quire.replica.model.output_head import split_model
from quire.replica.runner.forward import Forward
from quire.replica.runner.graph_cache import GraphCache
from quire.replica.runner.queued_steps import QueuedSteps
from quire.replica.runner.ragged_step import RaggedStep
from quire.replica.runner.step_inputs import direct_inputs
from quire.replica.runner.step_outputs import InFlight, StepOutputs
from quire.replica.sampling.step_sampler import Masks, StepSampler

_NO_BLOCKS = np.empty(0, np.int64)
# On a CPU: a step of the warm-up takes as long at most, by the time of one with so many tokens.
_WARM_UP_STEP_S = 1.0
_WARM_UP_TOKENS = 64


class Runner:
    """Runs plans.

    Parameters
    ----------
    config
        Device, dtype, limits, `deterministic` and `num_threads`.
    spec
        The checkpoint's shape.
    model
        `load_model`'s; modules are fused, and under `deterministic` replaced, in place.
    pool
        KV cache of `config.num_blocks` blocks. The host tier's memory, of `config.num_host_blocks`, is allocated
        here.
    device
        Whose streams the work is queued on; None for that of `config.device`.
    fused
        Of a model that another runner has fused; None: it is not.

    Raises
    ------
    ValueError
        `deterministic` cannot hold for this model, dtype or machine.
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
    ):
        self.config = config
        self.spec = spec
        self.model = model
        self.pool = pool
        self.backing = PoolBacking(pool)
        self._device = (
            open_device(config.device, use_nvtx=config.nvtx) if device is None else device
        )
        self.host_pool = HostPool(config.num_host_blocks, pool, self._device)
        self._sampler = StepSampler(config.vocab_size)
        # One more pads steps; and warm-up adds a prompt to all of them.
        self._outputs = StepOutputs(self._device, config.num_rows + 1)
        self._busy_until_s = 0.0  # when the step that was collected last was over
        self._graphs_at_ready = _num_traced_graphs()
        self._kernels_built = _KernelCount()
        if config.device == "cpu":
            torch.set_num_threads(config.num_threads)
        self._attentions = [self._attention(group, attention_backend) for group in pool.groups]
        # What fused layers pass from part to part on the CPU.
        self._workspace = Workspace() if self._attentions[0].backend == "cpu" else None
        self.fused = self._fuse() if fused is None else fused
        if config.deterministic:
            self._fix_order()
        self._forward = Forward(
            model, pool, self._attentions, config.max_running_requests, self._workspace
        )
        self._ragged = RaggedStep(self._forward, self._sampler, self._outputs, pool)
        self.queued: QueuedSteps | None = None  # where work does not run when it is queued
        if not self._device.is_immediate:
            backend = self._attentions[0].backend
            self.queued = QueuedSteps(
                config, self._device, pool, self._forward, self._ragged, self._outputs, backend
            )
        self._device.synchronize()  # the weights were not loaded on the compute stream

    def _fuse(self) -> FuseReport:
        """On the CPU the fused forms need the compiled library; without it the model stays as it is."""
        on_cpu = self._attentions[0].backend == "cpu"
        if self.config.fuse == "off" or (on_cpu and native_library.load() is None):
            return FuseReport()
        decoder, _ = split_model(self.model)
        int8 = self.config.weights == "int8"
        return fuse(
            self.model, decoder, self.pool, self._attentions, workspace=self._workspace, int8=int8
        )

    def _fix_order(self) -> None:
        """Give a row the same bits in every batch."""
        if self._attentions[0].backend == "cpu":
            make_deterministic(self.model)
            return
        from quire.replica.model.deterministic.fixed_products import fix_products

        fix_products(self.model)

    def _attention(self, group: LayerGroup, backend: Backend | None) -> PagedAttention:
        return PagedAttention(
            self.pool.keys(group.layers[0]),
            self.spec.num_heads,
            max_rows=self.config.max_running_requests + 1,
            max_len=self.config.max_model_len,
            window=group.window,
            chunk=group.chunk,
            share_prefixes=self.config.prefix_caching,
            uniform=self.config.deterministic,
            query_tokens=None if backend == "triton" else self._exact_query_tokens(group),
            dtype=getattr(torch, self.config.dtype),
            backend=backend,
        )

    def _exact_query_tokens(self, group: LayerGroup) -> int | None:
        """Prefill tile of the CPU's torch path with the decode tiles' bits; other paths need no such choice."""
        k_cache = self.pool.keys(group.layers[0])
        if (
            not self.config.deterministic
            or self.config.device != "cpu"
            or cpu_attention_native.supports(k_cache, self.spec.num_heads)
        ):
            return None
        return choose_query_tokens(
            self.spec.num_heads, group.num_kv_heads, group.head_dim, self.config.block_size
        )

    @classmethod
    def from_config(cls, config: EngineConfig, spec: ModelSpec) -> Runner:
        """Load the checkpoint of `spec` and allocate the pool."""
        model = load_model(spec, config.device, config.dtype, config.weights)
        return cls.with_pool(config, spec, model)

    @classmethod
    def with_pool(
        cls,
        config: EngineConfig,
        spec: ModelSpec,
        model: torch.nn.Module,
        *,
        device: Device | None = None,
        fused: FuseReport | None = None,
    ) -> Runner:
        """Allocate the pool for a model that is loaded."""
        pool = KVPool(
            config.num_blocks,
            spec.groups,
            config.block_size,
            getattr(torch, config.pool_dtype),
            config.device,
            read_kv_scales(spec) if config.kv_cache_dtype == "fp8" else None,
        )
        return cls(config, spec, model, pool, device=device, fused=fused)

    def run(self, plan: StepPlan) -> StepResult:
        """`launch` and `collect`."""
        return self.collect(self.launch(plan))

    def launch(self, plan: StepPlan) -> InFlight:
        """Start a step; on a GPU it returns before the step is done. Bounds were checked by the scheduler."""
        try:
            return self._launch(plan)
        except Exception:
            # No event tells when what it has queued is over: nothing it uses may change hands before.
            self._device.synchronize()
            raise

    def _launch(self, plan: StepPlan) -> InFlight:
        self.backing.forbid()
        slot = self._outputs.take(len(plan.sampling.token_index))
        in_flight = InFlight(slot, time.perf_counter())
        self._move_blocks(plan)
        # Before the forward pass: they have its time.
        masks = None if plan.awaits_tokens else self._sampler.begin(plan.sampling)
        forward = self._forward_now if self.queued is None else self.queued.forward
        in_flight.draw = forward(plan, in_flight)
        if not plan.awaits_tokens:
            self._draw(in_flight, plan.sampling, masks)
        elif self.queued is not None:
            self.queued.hold(in_flight)
        self.host_pool.move_rest()
        return in_flight

    def _move_blocks(self, plan: StepPlan) -> None:
        """Queue the copies between the tiers that must come before the step."""
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

    def sample(self, in_flight: InFlight, sampling: SamplingBatch) -> None:
        """The second half of a step whose plan awaited tokens: `Scheduler.complete` says what its rows may sample."""
        try:
            masks = self._sampler.begin(sampling)
            if masks is not None:
                masks.result()  # the draw waits for them anyway, and would be taken to have begun
            if self.queued is not None:
                self.queued.go_on(in_flight)
            self._draw(in_flight, sampling, masks)
        except Exception:
            self._device.synchronize()  # as in `launch`
            raise

    def _draw(self, in_flight: InFlight, sampling: SamplingBatch, masks: Masks) -> None:
        in_flight.slot.asked = sampling.logprobs
        in_flight.draw(sampling, masks)
        in_flight.draw = None
        if self.queued is not None:
            self.queued.end(in_flight)
            return
        self._outputs.send(in_flight.slot, self._device.record(Stream.COMPUTE, "step done"))
        in_flight.finished_s = time.perf_counter()

    def _forward_now(
        self, plan: StepPlan, in_flight: InFlight
    ) -> Callable[[SamplingBatch, Masks], None]:
        """The forward pass where work runs when it is queued; returns what draws."""
        inputs, tables = direct_inputs(plan), torch.from_numpy(plan.block_tables)
        logits: list[torch.Tensor] = []

        def compute() -> None:
            logits.append(self._ragged.logits(plan, inputs, tables, in_flight))

        def draw(sampling: SamplingBatch, masks: Masks) -> None:
            self._device.run(
                Stream.COMPUTE,
                lambda: self._ragged.draw_and_keep(
                    logits.pop(), inputs.sample_rows, sampling, in_flight, masks
                ),
                name=f"draw of step {plan.step}",
            )

        self._device.run(Stream.COMPUTE, compute, name=f"step {plan.step}")
        return draw

    def collect(self, in_flight: InFlight) -> StepResult:
        """Wait for a launched step.

        Raises
        ------
        RuntimeError
            It awaits tokens that never came: it is over, and has sampled nothing.
        """
        if in_flight.draw is not None:
            self._device.synchronize()
            raise RuntimeError("the step has not sampled: the one before it failed")
        tokens = in_flight.slot.collect()
        if self.queued is not None:
            self.queued.note(in_flight)
        logprobs = in_flight.slot.collect_scores()
        prompts = tuple(scores.to_host() for scores in in_flight.prompts)
        finished_s = in_flight.finished_s or time.perf_counter()
        # Launched behind another step it has not run before that was over.
        duration_s = finished_s - max(in_flight.started_s, self._busy_until_s)
        self._busy_until_s = finished_s
        restores = self.host_pool.take_measured()
        return StepResult(
            tokens, duration_s, logprobs, prompts, restores, self.host_pool.restored_step
        )

    def forward(self, plan: StepPlan) -> torch.Tensor:
        """Write the step's KV and return the logits of the rows that sample: [S, vocab] float32."""
        if self.queued is not None:
            return self.queued.logits(plan)
        tables = torch.from_numpy(plan.block_tables)
        with torch.inference_mode():
            return self._ragged.logits(plan, direct_inputs(plan), tables).float()

    @property
    def graphs(self) -> GraphCache | None:
        """Captured decode steps; None where work runs when it is queued."""
        return None if self.queued is None else self.queued.graphs

    def use_idle(self) -> bool:
        """Prepare for later steps while there is none; returns whether there was anything to do."""
        if self.queued is None:
            self.backing.allow()
            return False
        self.queued.fall_idle()
        return self.queued.graphs.use_idle()

    def close(self) -> None:
        """There is no later step: end the thread that `use_idle` may have started."""
        self.backing.close()

    def telemetry(self) -> dict[str, object]:
        """Counters of the device's time, graphs and copies since the start."""
        told = {} if self.queued is None else self.queued.telemetry()
        return {**told, "tiers": self.host_pool.telemetry()}

    def mark(self, name: str) -> AbstractContextManager[None]:
        """A range of the engine's thread for a profiler."""
        return self._device.mark(name)

    # ------------------------------------------------------------------------------------------------------
    # Warm-up
    # ------------------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Run the shapes that serving will see, so that nothing is first touched later; capture the first graphs."""
        self.run_largest()
        if self.config.deterministic and self._attentions[0].backend == "triton":
            from quire.replica.model.deterministic.fixed_products import warm_products

            with torch.inference_mode():
                warm_products(self.model, self.config.max_batch_tokens)
        if self.queued is not None:
            self.queued.graphs.capture_first()
            self.queued.fall_idle()
            self.queued.time = DeviceTime()

    def run_largest(self) -> None:
        """Run the largest steps on the trash block.

        Decode alone, a full prefill chunk, and both mixed; greedy and sampled. The pool's own blocks are not
        touched. On a CPU, which has nothing to compile, steps are no longer than a second: a slow one would compute
        for half a minute to save some page faults.
        """
        budget = self.config.max_batch_tokens
        rows = min(self.config.max_running_requests, budget)
        chunk = min(budget, self.config.max_model_len)
        both = (0.0, 1.0)
        # Where nothing has to be compiled a prefill touches the same either way.
        greedy, sampled = ((0.0,), (1.0,)) if self._device.is_immediate else (both, both)
        self._warm_up_steps([1], both)
        if self._device.is_immediate:
            budget = self._affordable(budget, min(chunk, _WARM_UP_TOKENS))
            rows, chunk = min(rows, budget), min(chunk, budget)
        self._warm_up_steps([1] * rows, sampled)
        self._warm_up_steps([chunk], greedy)
        self._warm_up_steps([1] * min(rows, budget - chunk // 2) + [chunk // 2], sampled)
        if not self._device.is_immediate:
            self.run(self._special_trash_plan(rows))

    def _affordable(self, budget: int, few: int) -> int:
        """As many of `budget` tokens as this processor computes in `_WARM_UP_STEP_S`, by the time of a few."""
        began = time.perf_counter()
        self._warm_up_steps([few], (0.0,))
        seconds = time.perf_counter() - began
        return max(few, min(budget, int(few * _WARM_UP_STEP_S / seconds)))

    def _warm_up_steps(self, lengths: list[int], temperatures: tuple[float, ...]) -> None:
        for temperature in temperatures:
            self.run(self._trash_plan([n for n in lengths if n > 0], temperature))

    def _trash_plan(self, lengths: list[int], temperature: float) -> StepPlan:
        """A step of rows with these numbers of new tokens, all of whose KV goes to the trash block."""
        num_rows, num_tokens = len(lengths), sum(lengths)
        block_size, trash = self.config.block_size, self.pool.trash_block
        num_groups = len(self.pool.groups)
        cu_q = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        positions = np.concatenate([np.arange(n) for n in lengths]).astype(np.int32)
        rows = np.full(num_rows, self.config.num_rows)  # the one that has no request
        decodes = max(lengths) == 1
        columns = SamplingBatch(
            token_index=cu_q[1:] - 1,
            temperature=np.full(num_rows, temperature, np.float32),
            top_k=np.full(num_rows, min(20, self.spec.vocab_size), np.int32),
            top_p=np.full(num_rows, 0.9, np.float32),
            seed=np.zeros(num_rows, np.uint64),
            choice=np.zeros(num_rows, np.int32),
            position=np.asarray(lengths, np.int64),
            rows=rows,
        )
        return StepPlan(
            step=0,
            num_decode_rows=sum(n == 1 for n in lengths),
            token_ids=np.zeros(num_tokens, np.int32),
            positions=positions,
            cu_q=cu_q,
            kv_len=np.asarray(lengths, np.int32),
            block_tables=np.full(
                (num_groups, num_rows, -(-max(lengths) // block_size)), trash, np.int32
            ),
            slots=np.tile(
                trash * block_size + positions.astype(np.int64) % block_size, (num_groups, 1)
            ),
            sampling=columns,
            decode_rows=rows if decodes else rows[:0],
            rows=rows,
        )

    def _special_trash_plan(self, num_rows: int) -> StepPlan:
        """Rows that ask for masks, lists and log-probs, one with penalties: all that a sampler has kernels for.

        Only row 0 gets counts, which stay: the first request there brings its own history.
        """
        plan = self._trash_plan([1] * num_rows, 0.0)
        one, zero = np.ones(1, np.float32), np.zeros(1, np.int64)
        two_ids = TokenRules(allowed_ids=np.arange(2))
        return plan._replace(
            sampling=plan.sampling._replace(
                suppressed=tuple((i, (1,)) for i in range(num_rows)),
                rules=tuple((i, two_ids) for i in range(num_rows)),
                penalties=Penalties(zero, zero, one, one, one, ((0, zero, zero),)),
                logprobs=tuple((i, 1) for i in range(num_rows)),
            ),
            prompts=(PromptTargets(self.config.num_rows, 0, 1, zero, 1),),
            decode_rows=plan.decode_rows[:0],
        )

    def mark_ready(self) -> None:
        """From here on `num_compiles` counts."""
        self._graphs_at_ready = _num_traced_graphs()
        self._kernels_built = _KernelCount()
        if "triton" not in sys.modules:  # nothing on this device uses it
            return
        from triton import knobs

        self._kernels_built.previous = knobs.runtime.jit_post_compile_hook
        knobs.runtime.jit_post_compile_hook = self._kernels_built

    @property
    def num_compiles(self) -> int:
        """Graphs that torch.compile traced and kernels that Triton built in this process since `mark_ready`."""
        return _num_traced_graphs() - self._graphs_at_ready + self._kernels_built.num


class _KernelCount:
    """A hook of Triton that counts what it builds.

    Triton keeps it as long as the process lives, so it must not refer to the runner: the weights would live as long.
    """

    def __init__(self) -> None:
        self.num = 0
        self.previous: Callable[..., bool | None] | None = None  # the hook that was there before

    def __call__(self, **kwargs: object) -> bool | None:
        self.num += 1
        return self.previous(**kwargs) if self.previous else None


def _num_traced_graphs() -> int:
    dynamo = sys.modules.get("torch._dynamo.utils")  # absent: nothing was ever traced
    return 0 if dynamo is None else dynamo.counters["stats"]["unique_graphs"]
