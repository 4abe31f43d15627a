"""Two engines that are compared on one GPU; each runs in its own process and has the GPU for itself.

Two 8B models with the caches that the workloads need do not fit one GPU, so the processes do not alternate as in `quire
bench compare`: the second starts after the first has ended. A process that takes too long for a workload is ended in
the middle of it.

transformers' continuous batching gets its best settings: FlashAttention if it is installed (without it there is neither
the fast decode path nor a CUDA graph), the workload's sizes as hints for its block tables and batch, a warm manager, no
streaming. `settings` lists the choices that depend on the workload; each is tried, and the fastest counts.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tests.perf.gpu.engine.gpu_models import Checkpoint

_WARM_UP = (8, 64, 4)  # requests, prompt tokens, new tokens
_POLL_S = 1.0
_NEVER_S = 1e6  # no limit here; the waiting process has one


@dataclass(frozen=True, slots=True)
class Job:
    """A workload that is run several times with different prompts."""

    turns: list[list[list[int]]]  # prompts of each turn
    max_tokens: int  # new tokens of every request
    at_s: list[float] | None = None  # send time of each request; None: all at once
    setting: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Served:
    """One turn: seconds after its start, by request."""

    first_s: list[float]
    last_s: list[float]
    facts: dict[str, Any] = field(default_factory=dict)  # about the engine

    @property
    def seconds(self) -> float:
        """Seconds to the last token of all requests."""
        return max(self.last_s)


def fastest(turns: Sequence[Served]) -> Served:
    """The fastest turn."""
    return min(turns, key=lambda served: served.seconds)


class Contestant(Protocol):
    """An engine with a model loaded."""

    def run(self, job: Job) -> Iterator[Served | None]:
        """Yield None when the engine is warm, then every turn."""
        ...


class Quire:
    """Quire. `options` are fields of `EngineArgs`."""

    def __init__(self, checkpoint: Checkpoint, device: str, options: dict[str, Any]):
        from tests.perf.gpu.engine.gpu_crowd import Crowd, random_prompts

        self._crowd = Crowd(checkpoint, device, **options)
        count, length, new_tokens = _WARM_UP
        self._crowd.serve(random_prompts(count, length, checkpoint.vocab_size, 0), new_tokens)

    def run(self, job: Job) -> Iterator[Served | None]:
        # Prompts are split only for the sake of waiting clients, and a batch has none.
        self._crowd.engine.reconfigure({"max_prefill_ms": None if job.at_s is None else 100.0})
        yield None
        for prompts in job.turns:
            served = self._crowd.serve(prompts, job.max_tokens, job.at_s, timeout_s=_NEVER_S)
            arrivals = served.arrivals_s(len(prompts))
            yield Served([each[0] for each in arrivals], [each[-1] for each in arrivals])


class Transformers:
    """transformers' continuous batching. `options`: fields of its `ContinuousBatchingConfig`; a job's override them."""

    def __init__(self, checkpoint: Checkpoint, device: str, options: dict[str, Any]):
        import torch
        from transformers import AutoModelForCausalLM, ContinuousBatchingConfig

        self._fields = {each.name for each in dataclasses.fields(ContinuousBatchingConfig)}
        self._options = dict(options)
        self.attention = flash_attention() if device == "cuda" else None
        model = AutoModelForCausalLM.from_pretrained(
            checkpoint.path,
            dtype=getattr(torch, checkpoint.dtype),
            attn_implementation=self.attention or "sdpa",
        ).to(device)
        if self.attention is None:
            # Otherwise it looks for kernels on the network. Before version 5.23 the name itself disables that.
            if "auto_switch_to_flash" in self._fields:
                self._options["auto_switch_to_flash"] = False
            else:
                model.set_attn_implementation("paged|sdpa")
        self._model = model.eval()
        self._vocab_size = checkpoint.vocab_size

    def run(self, job: Job) -> Iterator[Served | None]:
        from transformers import ContinuousBatchingConfig, GenerationConfig
        from transformers.generation.continuous_batching.utils import WorkloadHints

        from tests.perf.gpu.engine.gpu_crowd import random_prompts
        from tests.perf.gpu.gpu_session import free_memory

        longest = max(len(prompt) for prompts in job.turns for prompt in prompts)
        manager = self._model.init_continuous_batching(
            generation_config=GenerationConfig(
                max_new_tokens=job.max_tokens,
                do_sample=False,
                eos_token_id=-1,
                pad_token_id=0,
                bos_token_id=0,
            ),
            continuous_batching_config=ContinuousBatchingConfig(**self._options, **job.setting),
            workload_hints=WorkloadHints(
                max_prompt_length=longest,
                max_generated_length=job.max_tokens,
                num_requests=len(job.turns[0]),
            ),
        )
        manager.warmup()
        steps = _Steps(manager)
        manager.start()
        try:
            count, length, new_tokens = _WARM_UP
            warm_up = random_prompts(min(count, len(job.turns[0])), length, self._vocab_size, 0)
            _serve(manager, warm_up, new_tokens, None)
            yield None
            for prompts in job.turns:
                steps.reset()
                served = _serve(manager, prompts, job.max_tokens, job.at_s)
                facts = {"attention": self.attention or "sdpa", **steps.to_dict()}
                yield dataclasses.replace(served, facts=facts)
        finally:
            manager.stop(block=True, timeout=10)
            manager.destroy()
            del manager
            free_memory()


class _Steps:
    """Counts a manager's steps and those on its fast decode path. Steps with a prompt token, and all steps without
    FlashAttention, do not use the fast path."""

    def __init__(self, manager: Any):
        self.num_steps = self.num_fast = 0
        scheduler = manager.batch_processor.scheduler
        schedule = scheduler.schedule_batch

        def counted(*args: Any, **kwargs: Any) -> Any:
            found = schedule(*args, **kwargs)
            if found[0]:
                self.num_steps += 1
                self.num_fast += bool(found[1])
            return found

        scheduler.schedule_batch = counted

    def reset(self) -> None:
        self.num_steps = self.num_fast = 0

    def to_dict(self) -> dict[str, int]:
        return {"steps": self.num_steps, "fast_steps": self.num_fast}


def flash_attention() -> str | None:
    """transformers' name of the installed FlashAttention, or None."""
    for module, name in (("flash_attn_interface", "flash_attention_3"),
                         ("flash_attn", "flash_attention_2")):  # fmt: skip
        if importlib.util.find_spec(module):
            return name
    return None


def settings(device: str) -> list[dict[str, Any]]:
    """The configurations of transformers to try, the most promising first.

    Without FlashAttention the size of a step's mask is its tokens times the cached tokens. Fewer tokens per step may
    then be faster, and the reserved mask must leave room for the attention's copies of keys and values.
    """
    if device == "cpu":
        return [{"num_blocks": 24, "max_batch_tokens": 256}]
    if flash_attention():
        return [{"scheduler_type": "fifo"}, {"scheduler_type": "prefill_first"}]
    return [{"max_memory_percent": 0.7, "max_batch_tokens": tokens} for tokens in (2048, 8192)]


def _serve(
    manager: Any, prompts: Sequence[list[int]], max_tokens: int, at_s: Sequence[float] | None
) -> Served:
    """Seconds of every request from the manager's timestamps.

    Raises
    ------
    RuntimeError
        The manager's thread has ended, a request failed, or an answer has another length.
    """
    began_s = time.perf_counter()
    options = dict(max_new_tokens=max_tokens, record_timestamps=True)
    if at_s is None:
        names = manager.add_requests(list(prompts), **options)
    else:
        names = []
        for prompt, due_s in zip(prompts, at_s, strict=True):
            time.sleep(max(0.0, began_s + due_s - time.perf_counter()))
            names.append(manager.add_request(list(prompt), **options))
    found: dict[str, Any] = {}
    while len(found) < len(names):
        result = manager.get_result(timeout=_POLL_S)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("transformers' generation thread has ended")
        elif result.is_finished():
            if result.error is not None or len(result.generated_tokens) != max_tokens:
                count = len(result.generated_tokens)
                raise RuntimeError(f"{count} of {max_tokens} tokens came: {result.error}")
            found[result.request_id] = result
    times = [found[name].timestamps for name in names]
    return Served([each[0] - began_s for each in times], [each[-1] - began_s for each in times])


KINDS: dict[str, type] = {"quire": Quire, "transformers": Transformers}


class ContestantProcess:
    """A contestant in its own process; a context manager that ends the process.

    Parameters
    ----------
    kind
        One of `KINDS`.
    options
        Options of the contestant.
    timeout_s
        Longest time to load.

    Raises
    ------
    RuntimeError, TimeoutError
        The contestant could not be loaded, or not in time.
    """

    def __init__(
        self,
        kind: str,
        checkpoint: Checkpoint,
        device: str,
        options: dict[str, Any],
        timeout_s: float,
    ):
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = (theirs, kind, checkpoint, device, options)
        self._process = context.Process(target=_work, args=arguments, daemon=True)
        self._kind = kind
        self._process.start()
        theirs.close()
        try:
            self._receive(timeout_s)
        except BaseException:
            self.close()
            raise

    def warm_up(self, job: Job, timeout_s: float) -> None:
        """Send a job and wait until it begins.

        Raises
        ------
        RuntimeError, TimeoutError
            The job failed or took too long; the process cannot be used after that.
        """
        self._connection.send(job)
        self._receive(timeout_s)

    def turn(self, timeout_s: float) -> Served:
        """The next turn of the job; raises as `warm_up`."""
        served = self._receive(timeout_s)
        assert isinstance(served, Served)
        return served

    def close(self) -> None:
        """End the process at any time."""
        self._process.kill()
        self._process.join()
        self._connection.close()

    def __enter__(self) -> ContestantProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _receive(self, timeout_s: float) -> Any:
        if not self._connection.poll(max(timeout_s, 0.0)):
            raise TimeoutError(f"{self._kind}: no answer after {timeout_s:.1f} s")
        try:
            answer = self._connection.recv()
        except EOFError:
            raise RuntimeError(f"{self._kind}: the process has ended") from None
        if isinstance(answer, str):
            raise RuntimeError(f"{self._kind}: {answer}")
        return answer


def _work(
    connection: Any, kind: str, checkpoint: Checkpoint, device: str, options: dict[str, Any]
) -> None:
    """Body of the process: load, then run the jobs that it receives. It reports an error as a string."""
    try:
        contestant: Contestant = KINDS[kind](checkpoint, device, options)
        connection.send(None)
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")
        return
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        try:
            for served in contestant.run(job):
                connection.send(served)
        except Exception as error:
            connection.send(f"{type(error).__name__}: {error}")
