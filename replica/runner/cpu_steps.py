"""Steps on the CPU: launching a step computes it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from quire.replica.config import EngineConfig
from quire.replica.core.step_plan import SamplingBatch, StepPlan, StepResult
from quire.replica.core.warmup_plans import TrashPlans
from quire.replica.device.cpu_prefault import PoolPrefault
from quire.replica.device.device import Device, Stream
from quire.replica.device.kv_pool import KVPool
from quire.replica.runner.device_steps import Sample
from quire.replica.runner.graphs.graph_cache import GraphCache
from quire.replica.runner.ragged_step import RaggedStep
from quire.replica.runner.step_inputs import direct_inputs
from quire.replica.runner.step_outputs import InFlight, StepOutputs
from quire.replica.sampling.step_sampler import Masks

# Tokens of the longest step of the warm-up.
_WARM_UP_TOKENS = 64


class CpuSteps:
    """`DeviceSteps` on the CPU: work runs when it is queued.

    Parameters
    ----------
    pool
        KV cache; its memory is prefaulted while the engine is idle.
    ragged, outputs
        The runner's step without padding, and its owner of last tokens and result slots.
    """

    graphs: GraphCache | None = None

    def __init__(
        self,
        config: EngineConfig,
        device: Device,
        pool: KVPool,
        ragged: RaggedStep,
        outputs: StepOutputs,
    ):
        self._config = config
        self._device = device
        self._ragged = ragged
        self._outputs = outputs
        self.prefault = PoolPrefault(pool)

    def begin(self) -> None:
        """Stop the prefault thread until the engine is idle again."""
        self.prefault.forbid()

    def forward(self, plan: StepPlan, in_flight: InFlight) -> Sample:
        """Compute the forward pass; the returned function samples."""
        inputs, tables = direct_inputs(plan), torch.from_numpy(plan.block_tables.gather())
        logits: list[torch.Tensor] = []

        def compute() -> None:
            logits.append(self._ragged.logits(plan, inputs, tables, in_flight))

        def sample(sampling: SamplingBatch, masks: Masks) -> None:
            self._device.run(
                Stream.COMPUTE,
                lambda: self._ragged.sample_and_keep(
                    logits.pop(), inputs, sampling, in_flight, masks
                ),
                name=f"sampling of step {plan.step}",
            )

        self._device.run(Stream.COMPUTE, compute, name=f"step {plan.step}")
        return sample

    def hold(self, in_flight: InFlight) -> None:
        """Does nothing: only GPU steps measure this time."""

    def begin_sampling(self, in_flight: InFlight) -> None:
        """Does nothing: only GPU steps measure this time."""

    def end(self, in_flight: InFlight) -> None:
        """See `DeviceSteps.end`."""
        self._outputs.send(in_flight.slot, self._device.record(Stream.COMPUTE, "step done"))
        in_flight.finished_s = time.perf_counter()

    def note(self, in_flight: InFlight) -> None:
        """Does nothing: the engine's thread measures the time of CPU steps."""

    def logits(self, plan: StepPlan) -> torch.Tensor:
        """See `DeviceSteps.logits`."""
        tables = torch.from_numpy(plan.block_tables.gather())
        with torch.inference_mode():
            return self._ragged.logits(plan, direct_inputs(plan), tables).float()

    def run_largest(
        self, run: Callable[[StepPlan], StepResult], plans: TrashPlans
    ) -> dict[int, float]:
        """See `DeviceSteps.run_largest`.

        On a CPU nothing is compiled and nothing depends on the size of a step: after short steps, the first 700 tokens
        of prefill and the first 32 random rows take as long as later ones (0.6B parameters, two cores), while the
        largest steps would add 7 s to the start.
        """
        most = min(self._config.max_batch_tokens, self._config.max_model_len, _WARM_UP_TOKENS)
        seconds: dict[int, float] = {}
        for num_tokens, temperature in ((1, 0.0), (1, 1.0), (most, 0.0)):
            began_s = time.perf_counter()
            run(plans.plan([num_tokens], temperature))
            took_s = time.perf_counter() - began_s
            seconds[num_tokens] = min(took_s, seconds.get(num_tokens, took_s))
        return seconds

    def end_warm_up(self) -> None:
        """Does nothing: the CPU has neither graphs nor counters."""

    def use_idle(self) -> bool:
        """Let the prefault thread run. Return False, because the engine's own thread has nothing to prepare."""
        self.prefault.allow()
        return False

    def close(self) -> None:
        """End the prefault thread."""
        self.prefault.close()

    def telemetry(self) -> dict[str, object]:
        """Return {}: the CPU has no counters."""
        return {}
