"""Offline use of an engine: generates for lists of prompts, without Ray and without a server."""

from __future__ import annotations

import dataclasses
import itertools
import queue
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from quire.protos.errors import EngineError, QuireError
from quire.protos.sampling_params import SamplingParams
from quire.protos.wire import PromptLogprobs, TokenDelta, TokenLogprob
from quire.replica.config import EngineConfig
from quire.replica.core.adapter import Adapter
from quire.replica.core.request import Request, validate
from quire.replica.host_machine import give_back_free_memory
from quire.replica.loop import LoopOutput

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Tokenizer

Prompt = str | Sequence[int]
_LIVENESS_PERIOD_S = 0.5  # how often a waiting call checks that the engine runs
_Sink = queue.SimpleQueue[list[TokenDelta]]  # deltas of each step for one call


@dataclass(slots=True)
class RequestOutput:
    """The complete answer to one prompt."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str  # decoded token_ids, without special tokens
    finish_reason: str  # stop | length | abort (the engine was closed)
    num_cached_tokens: int
    params: SamplingParams  # as used, with the random seed that was chosen
    logprobs: list[TokenLogprob] | None = None  # one per token, if `SamplingParams.logprobs` is set
    # Log-probs of the prompt without its first token, in consecutive parts, if `SamplingParams.prompt_logprobs` is set.
    prompt_logprobs: list[PromptLogprobs] | None = None
    # [hidden size] float32, if `SamplingParams.pooling` is set.
    embedding: np.ndarray | None = None
    # Drafted tokens that were verified, and the accepted ones, which are in `token_ids`.
    num_drafted: int = 0
    num_accepted: int = 0


@dataclass(slots=True)
class StreamOutput:
    """Output added by one step."""

    token_ids: list[int]
    text: str  # complete characters only
    finish_reason: str | None


class RunningEngine(Protocol):
    """The part of `engine.Engine` that the offline front uses."""

    config: EngineConfig
    checkpoint: Path

    def submit(self, request: Request) -> None:
        """Queue a request."""
        ...

    def abort(self, key: Hashable) -> None:
        """End a request if it is still alive."""
        ...

    def is_alive(self) -> bool:
        """Whether the loop's thread runs."""
        ...


class OfflineFront:
    """Submits prompts to an engine and collects the output of its loop.

    Thread-safe: several threads may call `generate` and `stream` at the same time and share the batch.
    """

    def __init__(self, engine: RunningEngine):
        self._engine = engine
        self._keys = itertools.count()
        self._sinks: dict[Hashable, _Sink] = {}  # by key, for every live request
        # Bounds the live requests of all callers to the engine's queue, so none is rejected.
        self._slots = threading.Semaphore(engine.config.max_waiting_requests)
        self._tokenizer_lock = threading.Lock()
        self._cached_tokenizer: Tokenizer | None = None

    def on_output(self, output: LoopOutput) -> None:
        """Give each call all deltas of the step at once, so that it wakes once. Runs in the engine's thread."""
        of_calls: dict[_Sink, list[TokenDelta]] = {}
        for delta in output.deltas:
            sink = self._sinks.get(delta.key)
            if sink is None:
                continue  # submitted through `Engine.submit`
            if delta.finish_reason is not None:
                del self._sinks[delta.key]
                self._slots.release()
            of_calls.setdefault(sink, []).append(delta)
        for sink, deltas in of_calls.items():
            sink.put(deltas)

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        progress: bool | None = None,
        adapter: Adapter | None = None,
    ) -> list[RequestOutput]:
        """Generate for all prompts in one continuous batch.

        Parameters
        ----------
        prompts
            Texts or lists of token ids, any number: the engine's queue is refilled as requests finish.
        params
            One for all prompts, or one for each; by default greedy. With a temperature above 0, a seed of 0 is replaced
            by a random seed.
        n
            Samples per prompt; the prompt is computed once. Samples differ in `SamplingParams.choice`, and
            outputs[n * i + choice] belongs to prompts[i].
        progress
            Show a progress bar on standard error. The default is to show it on a terminal for more than 8 prompts.
        adapter
            Result of `Engine.adapter`, for all prompts; None: the model alone.

        Raises
        ------
        QuireError
            A prompt can never be served (nothing was generated; the message names prompt and field), or the engine
            failed or was closed.
        """
        if isinstance(prompts, str):
            raise TypeError("prompts must be a list of prompts, got a string")
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ValueError(f"n must be an integer >= 1, got {n!r}")
        requests: list[Request] = []
        for i, (prompt, p) in enumerate(
            zip(prompts, self._params_for(prompts, params), strict=True)
        ):
            lead = self._request(prompt, p, f"prompts[{i}]", adapter=adapter)
            requests.append(lead)
            for choice in range(1, n):
                of_choice = dataclasses.replace(p, choice=p.choice + choice)
                requests.append(
                    self._request(
                        lead.token_ids,
                        of_choice,
                        f"prompts[{i}]",
                        fork_of=lead.key,
                        adapter=adapter,
                    )
                )
        outputs = {request.key: _output(request) for request in requests}
        waiting = deque(requests)
        done: _Sink = queue.SimpleQueue()
        alive: set[Hashable] = set()
        bar = _progress_bar(len(requests), progress)
        try:
            while waiting or alive:
                while waiting and self._take_slot(wait=not alive):
                    alive.add(waiting[0].key)
                    self._submit(waiting.popleft(), done)
                for delta in self._next(done):
                    _collect(outputs[delta.key], delta)
                    if delta.finish_reason is not None:
                        alive.discard(delta.key)
                        bar.update()
        finally:
            bar.close()
            for key in alive:
                self._engine.abort(key)
        tokenizer = self._tokenizer
        for output in outputs.values():
            output.text = tokenizer.decode(output.token_ids) if tokenizer else ""
        return list(outputs.values())

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Iterator[StreamOutput]:
        """Generate for one prompt and yield the output of each step. Closing the iterator aborts the request.

        The prompt is checked now and submitted at the first `next`.
        """
        (p,) = self._params_for([prompt], params)
        return self._stream(self._request(prompt, p, "prompt"))

    def _stream(self, request: Request) -> Iterator[StreamOutput]:
        done: _Sink = queue.SimpleQueue()
        text = _TextStream(self._tokenizer)
        output = _output(request)
        self._take_slot(wait=True)
        self._submit(request, done)
        try:
            while not output.finish_reason:
                for delta in self._next(done):
                    _collect(output, delta)
                    new_text = text.feed(delta.token_ids, last=delta.finish_reason is not None)
                    yield StreamOutput(delta.token_ids, new_text, delta.finish_reason)
        finally:
            if not output.finish_reason:
                self._engine.abort(request.key)

    def _request(
        self,
        prompt: Prompt | np.ndarray,
        params: SamplingParams,
        name: str,
        fork_of: Hashable | None = None,
        adapter: Adapter | None = None,
    ) -> Request:
        """Create a request and check that the engine can serve it."""
        try:
            request = Request(
                next(self._keys),
                self._encode(prompt),
                params,
                arrival_s=time.monotonic(),
                fork_of=fork_of,
                adapter=adapter,
            )
            validate(request, self._engine.config)
        except QuireError as error:
            raise type(error)(f"{name}: {error.message}", field=error.field) from None
        return request

    def _take_slot(self, wait: bool) -> bool:
        """Take a slot for a request; returns False if there is none and `wait` is False."""
        while not self._slots.acquire(timeout=_LIVENESS_PERIOD_S if wait else 0):
            if not wait:
                return False
            self._check_alive()
        return True

    def _submit(self, request: Request, done: _Sink) -> None:
        """Submit a request; the caller has taken a slot."""
        self._sinks[request.key] = done
        try:
            self._engine.submit(request)
        except BaseException:
            del self._sinks[request.key]
            self._slots.release()
            raise

    def _next(self, done: _Sink) -> list[TokenDelta]:
        """Wait for the deltas of the next step with output for this call."""
        while True:
            ended = (
                not self._engine.is_alive()
            )  # read first, because an ending engine still sends deltas
            try:
                return done.get(timeout=0 if ended else _LIVENESS_PERIOD_S)
            except queue.Empty:
                if ended:
                    self._check_alive()

    def _check_alive(self) -> None:
        if not self._engine.is_alive():
            raise EngineError("the engine's loop has ended")

    @staticmethod
    def _params_for(
        prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if params is None:
            params = SamplingParams(temperature=0.0)
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"params: {len(each)} for {len(prompts)} prompts")
        return [
            p if p.seed or p.temperature == 0 else dataclasses.replace(p, seed=secrets.randbits(64))
            for p in each
        ]

    def _encode(self, prompt: Prompt | np.ndarray) -> Sequence[int] | np.ndarray:
        if not isinstance(prompt, str):
            return prompt
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise ValueError("the checkpoint has no tokenizer.json: give token ids")
        return tokenizer.encode(prompt).ids

    @property
    def _tokenizer(self) -> Tokenizer | None:
        path = self._engine.checkpoint / "tokenizer.json"
        with self._tokenizer_lock:
            if self._cached_tokenizer is None and path.exists():
                from tokenizers import Tokenizer

                tokenizer = Tokenizer.from_file(str(path))
                tokenizer.no_truncation()  # some files enable it, but prompts are never cut
                tokenizer.no_padding()
                self._cached_tokenizer = tokenizer
                give_back_free_memory()  # parsing the file leaves as much free memory as the tokenizer uses
        return self._cached_tokenizer


class _TextStream:
    """Decodes one stream in pieces that end at character boundaries.

    A new piece is decoded together with the tokens of the previous piece, whose text is then cut off. Otherwise
    tokenizers that decode the first token of a text differently would treat each piece as the start of a text.
    """

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []  # from the last returned piece on
        self._num_told = 0  # tokens of the last returned piece

    def feed(self, token_ids: list[int], last: bool) -> str:
        """Return the new complete characters; with `last`, all remaining text."""
        if self._tokenizer is None:
            return ""
        self._token_ids += token_ids
        told = self._tokenizer.decode(self._token_ids[: self._num_told])
        text = self._tokenizer.decode(self._token_ids)
        if text.endswith("\ufffd") and not last:  # an incomplete character
            return ""
        self._token_ids = self._token_ids[self._num_told :]
        self._num_told = len(self._token_ids)
        return text[len(told) :]


def _output(request: Request) -> RequestOutput:
    """Create an empty output. Call it before the request is submitted."""
    return RequestOutput(request.token_ids.tolist(), [], "", "", 0, request.params)


def _collect(output: RequestOutput, delta: TokenDelta) -> None:
    output.token_ids.extend(delta.token_ids)
    facts = delta.facts
    if facts.error is not None:
        raise facts.error
    output.num_cached_tokens = max(output.num_cached_tokens, facts.num_cached_tokens)
    if facts.logprobs is not None:
        output.logprobs = [*(output.logprobs or ()), *facts.logprobs]
    if facts.prompt_logprobs is not None:
        output.prompt_logprobs = [*(output.prompt_logprobs or ()), facts.prompt_logprobs]
    output.embedding = facts.embedding
    output.num_drafted = facts.num_drafted or 0
    output.num_accepted = facts.num_accepted or 0
    output.finish_reason = facts.finish_reason or ""


def _progress_bar(total: int, progress: bool | None):
    from tqdm import tqdm

    show = progress if progress is not None else total > 8 and sys.stderr.isatty()
    return tqdm(total=total, disable=not show, unit="request", file=sys.stderr)
