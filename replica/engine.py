"""The engine: one model on one device, with its loop, its cache and a front for offline use.

`Engine` owns its parts and the loop's thread. The actor (`actor.py`) or a script submits requests and receives the
output of every step through one callback. `generate` and `stream` are for offline use, without a server; they are built
on the same interface.

    from quire.replica import Engine
    from quire.protos.sampling_params import SamplingParams

    with Engine(model="embedded") as engine:
        outputs = engine.generate(["A quire is"], SamplingParams(max_tokens=32, temperature=0))
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from quire.protos.adapter_ref import AdapterRef
from quire.protos.errors import EngineError, InvalidRequest, QuireError, Unavailable
from quire.protos.flight_recorder import FlightRecorder
from quire.protos.metric_families import Histogram
from quire.protos.sampling_params import SamplingParams
from quire.protos.wire import Hello, Load
from quire.replica.adapters.adapter_library import MAX_HOST_ADAPTERS, AdapterLibrary
from quire.replica.adapters.adapter_reports import AdapterReports
from quire.replica.checkpoint.model_spec import ModelSpec
from quire.replica.config import (
    LIGHT_FIELDS,
    EngineArgs,
    EngineConfig,
    check_args,
    light_fields,
)
from quire.replica.core.adapter import Adapter
from quire.replica.core.draft_source import DraftSource
from quire.replica.core.request import FinishReason, Request, validate
from quire.replica.grammar.compiler import GrammarCompiler
from quire.replica.grammar.state import GrammarState
from quire.replica.host_machine import no_collections
from quire.replica.kv_cache.groups import sequence_blocks
from quire.replica.loop import EngineLoop, LoopOutput, StepRunner
from quire.replica.offline import OfflineFront, RequestOutput, StreamOutput
from quire.replica.scheduler.scheduler import Scheduler
from quire.replica.speculation.draft_sources import open_draft_source

if TYPE_CHECKING:
    from torch import nn

    from quire.replica.node_pool.node_pool import NodePool
    from quire.replica.node_pool.pool_file import PoolPlace
    from quire.replica.ranks.leading_ranks import LeadingRanks, StartRank
    from quire.replica.ranks.rank_links import RankEnd

# After this number of consecutive failed steps the engine is unhealthy: the cause is the device (CUDA errors are
# sticky), not a request. Without a limit the router would send all traffic to this idle engine.
MAX_FAILED_STEPS = 3
# Tokens of prompt and output of a typical request, a chat of several turns. `hello` reports how many of these fit.
TYPICAL_LEN = 2048
T = TypeVar("T")
Prompt = str | Sequence[int]

logger = logging.getLogger(__name__)


class Engine:
    """Loads a checkpoint, warms up and runs.

    Parameters
    ----------
    args
        Model and limits. Keyword arguments are short for `EngineArgs(**overrides)`.
    on_output
        Called in the engine's thread after each turn of the loop with output; must not block. If it is None, the output
        goes to `generate` and `stream`.
    flight_path
        File of the flight recorder. After a crash it names the requests that were running.
    node_pool
        Where the engines of this node find their pool of KV blocks; None: the host tier is private.
    prove
        Whether to compare a tiny model of the checkpoint's class with transformers first (`replica/proof`); False for
        the engine of such a comparison.
    start_rank
        With `tensor_parallel`, starts another rank; None: as a child process.

    Raises
    ------
    CheckpointError, SizingError
        The checkpoint is not supported, or does not fit; the message has the reason.
    """

    def __init__(
        self,
        args: EngineArgs | None = None,
        *,
        on_output: Callable[[LoopOutput], None] | None = None,
        flight_path: Path | None = None,
        node_pool: PoolPlace | None = None,
        prove: bool = True,
        start_rank: StartRank | None = None,
        **overrides: Any,
    ):
        if args is not None and overrides:
            raise TypeError("give EngineArgs or keyword arguments, not both")
        args = args if args is not None else EngineArgs(**overrides)
        self._args = args
        self.startup_s, began = dict[str, float](), time.perf_counter()
        # Seconds, so not at `import quire.replica`. Collections, of a million objects that stay, would add half a one.
        with no_collections():
            from quire.replica.proof.verdicts import check_model
            from quire.replica.startup.runtime import load_runtime
        self.startup_s["imports"] = time.perf_counter() - began

        def check(spec: ModelSpec, device: str) -> None:
            if prove:
                start = functools.partial(Engine, prove=False)
                check_model(spec, device, start, with_ranks=args.num_splits > 1)

        self._ranks: LeadingRanks | None = None
        if args.tensor_parallel > 1:
            self._ranks = _lead(args, start_rank)
        try:
            runtime = load_runtime(args, self.startup_s, check, self._ranks, node_pool)
        except BaseException:
            self._close_ranks()
            raise
        self.config: EngineConfig = runtime.config
        short = runtime.spec.short_context
        if prove and short is not None and self.config.max_model_len > short:
            logger.warning(
                "max_model_len %d exceeds original_max_position_embeddings %d: all sequences get the long factors of "
                "longrope, also those for which transformers uses the short factors",
                self.config.max_model_len,
                short,
            )
        self.checkpoint: Path = runtime.checkpoint
        self.fused: dict[str, Any] = runtime.runner.fused.to_dict()
        # As it runs; a failed proof looks into it.
        self.model: nn.Module = runtime.runner.model
        num_kept = max(MAX_HOST_ADAPTERS, self.config.max_loaded_adapters)
        self._adapters = AdapterLibrary(runtime.runner.adapter_reader, num_kept)
        self._node_pool = runtime.node_pool
        self._draft_runner = runtime.draft_runner
        drafts = self._open_draft_source()
        scheduler = Scheduler(self.config, draft_source=drafts, node_pool=self._node_pool)
        scheduler.speed.begin_with(runtime.runner.warm_step_s)
        self.epoch: str = scheduler.events.epoch
        self._copies = scheduler.copies  # its counters are read from any thread
        self._tiers = (scheduler.memory.blocks, scheduler.memory.host.blocks)
        # Other threads only read the pool's layout and the names of its blocks.
        self.pool_blocks = scheduler.memory.host.pool_blocks
        self._offline: OfflineFront | None = None
        if on_output is None:
            self._offline = OfflineFront(self)
            on_output = self._offline.on_output
        self.recorder: FlightRecorder | None = None
        if flight_path is not None:
            self.recorder = FlightRecorder(flight_path, self.config.max_running_requests)
        self._flight_path = flight_path
        adapter_report = None
        if (adapted := runtime.runner.adapted) is not None:
            slots = scheduler.rows.adapters
            adapter_report = AdapterReports(slots, self._adapters, adapted.load_time).latest
        self._runner, clock = self._equip(runtime.runner)
        self._loop = EngineLoop(
            scheduler,
            self._runner,
            on_output,
            clock=clock,
            step_timeout_s=self.config.step_timeout_s,
            recorder=self.recorder,
            plans_ahead=self.config.plans_ahead,
            mark=runtime.runner.mark if self.config.nvtx else None,
            save_blocks=runtime.runner.save_blocks,
            adapter_report=adapter_report,
        )
        self._grammars = GrammarCompiler(
            self.checkpoint / "tokenizer.json",
            self.config.vocab_size,
            self.config.eos_token_ids,
            self.config.json_white_space,
        )
        self._compiling_lock = threading.Lock()
        # Requests whose grammar is being compiled; the scheduler does not know them yet.
        self._compiling: dict[Hashable, Request] = {}
        self.step_seconds: Histogram = self._loop.step_seconds  # a reading may be one step old
        self._loop.start()
        # If the interpreter exits while the thread is inside torch, the process ends with SIGABRT.
        self._at_exit = weakref.finalize(
            self,
            _close,
            weakref.ref(self._loop),
            self.config.step_timeout_s,
            self._ranks,
            runtime.node_pool,
        )

    def _equip(self, runner: StepRunner) -> tuple[StepRunner, Callable[[], float]]:
        """Return runner and clock of the loop. Fault injection in tests (`faults.py`) overrides this method."""
        return runner, time.monotonic

    def _open_draft_source(self) -> DraftSource | None:
        """Return the source of drafts; None: no speculation. Tests override this method."""
        return open_draft_source(self.config, self._draft_runner)

    def submit(self, request: Request) -> None:
        """Queue a request; its output arrives through the callback.

        Raises
        ------
        QuireError
            The request can never be served, or the engine is closed. A full queue is reported later, in the
            request's only delta.
        """
        validate(request, self.config)
        if request.params.grammar is None:
            self._loop.post(lambda scheduler: scheduler.add(request))
        else:
            self._compile(request)

    def adapter(self, ref: AdapterRef) -> Adapter:
        """Return an adapter for `Request.adapter`. Reads its folder if it is not in memory; any thread may call this.

        Raises
        ------
        InvalidRequest
            The engine has no adapters, or the folder cannot be used; the message has the reason.
        """
        adapter = self._adapters.get(ref)
        with contextlib.suppress(Unavailable):  # wakes an idle loop, which reports the adapter
            self._loop.post(lambda scheduler: None)
        return adapter

    def known_adapter(self, ref: AdapterRef) -> Adapter | None:
        """Return an adapter that is in memory, or None."""
        return self._adapters.find(ref)

    def forget_adapter(self, digest: str) -> None:
        """Free the memory of an adapter; live requests keep it until they end."""
        self._adapters.forget(digest)
        with contextlib.suppress(Unavailable):
            self._loop.post(lambda scheduler: scheduler.rows.adapters.forget(digest))

    def abort(self, key: Hashable) -> None:
        """End a request if it is still alive; its last delta has the reason `abort`."""
        with contextlib.suppress(Unavailable):  # closing has ended the request
            compiling = self._take_compiling(key)
            if compiling is not None:
                ended = compiling.delta(compiling.num_emitted, [], FinishReason.ABORT)
                self._loop.post(lambda scheduler: ended)
            else:
                self._loop.post(lambda scheduler: scheduler.abort(key))

    def grant(self, credit: Mapping[Hashable, int]) -> None:
        """Raise the credit of requests: by key, the number of output tokens that the client has allowed so far."""

        def grant(scheduler: Scheduler) -> None:
            for key, credit_end in credit.items():
                scheduler.grant(key, credit_end)

        with contextlib.suppress(Unavailable):  # closing has ended the requests
            self._loop.post(grant)

    def drop_retained(self, keys: Iterable[Hashable]) -> None:
        """Evict the blocks of these requests in the ordinary order, once they have ended or from now on."""

        def drop(scheduler: Scheduler) -> None:
            for key in keys:
                scheduler.drop_retained(key)

        with contextlib.suppress(Unavailable):  # the engine's cache is gone
            self._loop.post(drop)

    def call(self, action: Callable[[Scheduler], T]) -> Future[T]:
        """Run `action` on the scheduler between two steps."""
        return self._loop.call(action)

    def load(self) -> Load:
        """Return the current load; a reading from another thread may be one step old."""
        return self._loop.load()

    def num_evictions(self) -> tuple[int, int]:
        """Evicted blocks so far, on the device and in the host tier; a reading may be one step old."""
        device, host = self._tiers
        return device.num_evictions, host.num_evictions

    def reconfigure(self, changes: Mapping[str, Any]) -> None:
        """Change options of `LIGHT_FIELDS` while the engine runs. The others of these return to their values at start.

        Raises
        ------
        InvalidRequest
            A field cannot change while the engine runs; the message lists those that can.
        SizingError
            A value is out of bounds.
        """
        heavy = sorted(changes.keys() - set(LIGHT_FIELDS))
        if heavy:
            raise InvalidRequest(
                f"{', '.join(heavy)}: only {', '.join(LIGHT_FIELDS)} can change while the engine runs"
            )
        args = dataclasses.replace(self._args, **changes)
        check_args(args)
        config = dataclasses.replace(self.config, **light_fields(args))
        self.call(lambda scheduler: scheduler.reconfigure(config)).result()
        self._loop.step_watch.timeout_s = config.step_timeout_s
        self.config = config

    def snapshot(self) -> dict[str, Any]:
        """Return blocks, rows and queues between two steps, the fuse report, and `telemetry`, as plain data."""
        state = self.call(lambda scheduler: scheduler.snapshot()).result()
        return {**state, "fused": self.fused, "steps": self.telemetry()}

    def telemetry(self) -> dict[str, Any]:
        """Return the time of steps since the start by part; a reading may be one step old.

        | key | |
        |---|---|
        | host | milliseconds per step of the engine's thread, by part |
        | device | on a GPU: busy milliseconds per step, gaps between steps, waits for tokens before sampling |
        | graphs | steps with and without a graph, and padding; decode steps, and mixed steps under `mixed` |
        | uploads, downloads | copies of inputs and of tokens, and their bytes |
        | tiers | blocks saved and restored; how often blocks were copied, and how often recomputed |
        """
        time, copies = self._loop.time, self._copies
        told: dict[str, Any] = self._runner.telemetry()
        tiers = {"num_copied": copies.num_copied, "num_computed": copies.num_computed}
        return {
            "host": {"num_steps": time.num_steps, **time.per_step_ms()},
            **told,
            "tiers": {**told.get("tiers", {}), **tiers},
        }

    def check(self) -> None:
        """Raise AssertionError if blocks, references and rows are inconsistent."""
        self.call(lambda scheduler: scheduler.check()).result()

    def hello(self, replica: str, node: str = "") -> Hello:
        """Return the constant facts about this engine."""
        config = self.config
        typical_len = min(TYPICAL_LEN, config.max_model_len)
        blocks = sequence_blocks(config.groups, typical_len, 1, config.block_size)
        return Hello(
            replica=replica,
            epoch=self.epoch,
            model_name=config.model_name,
            revision=config.revision,
            dtype=config.number_format,
            vocab_size=config.vocab_size,
            max_model_len=config.max_model_len,
            max_cache_tokens=config.max_cache_tokens,
            block_size=config.block_size,
            eos_token_ids=list(config.eos_token_ids),
            startup_s={name: round(s, 3) for name, s in self.startup_s.items()},
            node=node,
            flight="" if self._flight_path is None else str(self._flight_path),
            device=config.device,
            num_threads=config.num_threads if config.device == "cpu" else 0,
            cache_tokens=config.num_blocks * typical_len // blocks,
            typical_len=typical_len,
            typical_requests=min(config.num_blocks // blocks, config.max_running_requests),
            has_states=config.has_states,
            hidden_size=config.hidden_size,
        )

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        progress: bool | None = None,
        adapter: Adapter | None = None,
    ) -> list[RequestOutput]:
        """Generate for all prompts in one batch; outputs are in the order of prompts (`OfflineFront.generate`)."""
        return self._front().generate(prompts, params, n=n, progress=progress, adapter=adapter)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Iterator[StreamOutput]:
        """Generate for one prompt and yield the output of each step (`OfflineFront.stream`)."""
        return self._front().stream(prompt, params)

    def is_alive(self) -> bool:
        """Whether the loop's thread runs."""
        return self._loop.is_alive()

    def check_health(self) -> None:
        """Raise `EngineError` if the loop has ended, a step hangs, or the last `MAX_FAILED_STEPS` steps failed."""
        if not self._loop.is_alive():
            raise EngineError("the engine's loop has ended")
        if self._ranks is not None:
            self._ranks.links.check()
        complaint = self._loop.step_watch.complaint()
        if complaint is not None:
            raise EngineError(complaint)
        if self._loop.num_failed_in_a_row >= MAX_FAILED_STEPS:
            raise EngineError(f"the last {self._loop.num_failed_in_a_row} steps failed")

    def watch(self, on_hang: Callable[[str], None]) -> threading.Thread:
        """Start a thread that calls `on_hang` once, with the reason, when a step exceeds its time limit."""
        return self._loop.step_watch.watch(on_hang)

    def watch_ranks(self, on_end: Callable[[RankEnd], None]) -> None:
        """Call `on_end` when another rank has ended; no step can run from then on."""
        if self._ranks is not None:
            self._ranks.links.on_end(on_end)

    def close(self) -> None:
        """Stop the loop; live requests end with `abort`."""
        for key in list(self._compiling):
            self.abort(key)
        self._grammars.close()
        self._loop.close()
        self._close_ranks()
        was_open = self._at_exit.detach() is not None
        if was_open and self._node_pool is not None and not self._loop.is_alive():
            self._node_pool.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take_compiling(self, key: Hashable, expected: Request | None = None) -> Request | None:
        """Remove and return the request with this key if its grammar is still being compiled, and if it is `expected`.

        The caller that gets the request, the compiler's thread or `abort`, decides its outcome.
        """
        with self._compiling_lock:
            request = self._compiling.get(key)
            if request is None or (expected is not None and request is not expected):
                return None
            return self._compiling.pop(key)

    def _compile(self, request: Request) -> None:
        """Queue the request once its grammar is compiled. If that fails, its only delta has the error."""
        if self._compiling.setdefault(request.key, request) is not request:
            raise InvalidRequest(f"request_id: {request.key!r} is in use", field="request_id")

        def on_done(outcome: GrammarState | QuireError) -> None:
            if not self._take_compiling(request.key, request):
                return  # aborted; another request may have the key now
            if isinstance(outcome, QuireError):
                self._loop.post(lambda scheduler: request.refusal(outcome))
                return
            request.grammar = outcome
            self._loop.post(lambda scheduler: scheduler.add(request))

        assert request.params.grammar is not None
        emitted_ids = request.token_ids[request.num_prompt_tokens :].tolist()
        try:
            self._grammars.submit(request.params.grammar, emitted_ids, on_done, request.tenant)
        except QuireError:
            self._take_compiling(request.key, request)
            raise

    def _close_ranks(self) -> None:
        if self._ranks is not None:
            self._ranks.close()

    def _front(self) -> OfflineFront:
        if self._offline is None:
            raise RuntimeError("this engine's output goes to its on_output callback")
        return self._offline


def _lead(args: EngineArgs, start_rank: StartRank | None) -> LeadingRanks:
    """Start the other ranks; they import their libraries while this one checks the checkpoint."""
    from quire.replica.ranks.leading_ranks import LeadingRanks, start_process

    check_args(args)
    return LeadingRanks(args.tensor_parallel, start_process if start_rank is None else start_rank)


def _close(
    loop: weakref.ref[EngineLoop],
    timeout_s: float,
    ranks: LeadingRanks | None,
    node_pool: NodePool | None,
) -> None:
    """Close the loop if it still exists, then the ranks and the pool; a running loop's thread keeps it alive."""
    found = loop()
    if found is not None:
        found.close(timeout_s)
    if ranks is not None:
        ranks.close()
    if node_pool is not None and (found is None or not found.is_alive()):
        node_pool.close()
