"""The offline front of an engine: lists of prompts in, outputs out, without Ray and without a server."""

from __future__ import annotations

import dataclasses
import itertools
import queue
import secrets
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quire.protos.errors import EngineError
from quire.protos.wire import SamplingParams, TokenLogprob
from quire.replica.loop import LoopOutput
from quire.replica.plan import RequestDelta
from quire.replica.request import Request

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from quire.replica.engine import Engine

Prompt = str | Sequence[int]


@dataclass(slots=True)
class RequestOutput:
    """The whole answer to one prompt."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str  # token_ids decoded, special tokens left out
    finish_reason: str  # stop | length | abort
    num_cached_tokens: int
    params: SamplingParams  # as used: the seed that was drawn is in here
    logprobs: list[TokenLogprob] | None = None  # one for each token, with `SamplingParams.logprobs`


@dataclass(slots=True)
class StreamOutput:
    """What one step added."""

    token_ids: list[int]
    text: str  # complete characters only
    finish_reason: str | None


class OfflineFront:
    """Submits prompts to an engine and collects what its loop sends out.

    Thread-safe: several threads may call `generate` and `stream` at once and share the batch.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._keys = itertools.count()
        self._sinks: dict[int, queue.SimpleQueue[tuple[int, RequestDelta]]] = {}
        self._tokenizer_lock = threading.Lock()
        self._cached_tokenizer: Tokenizer | None = None

    def on_output(self, output: LoopOutput) -> None:
        """Hand every delta to the call that waits for it (engine's thread)."""
        for delta in output.deltas:
            sink = self._sinks.get(delta.key)
            if sink is not None:
                sink.put((delta.key, delta))
                if delta.finish_reason is not None:
                    del self._sinks[delta.key]

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Generate for all prompts in one continuous batch.

        Parameters
        ----------
        prompts
            Text or token ids each. Any number: the engine's queue is refilled as requests finish.
        params
            One for all, or one for each; by default greedy with the `SamplingParams` defaults.
            A seed of 0 with a temperature above 0 draws a fresh seed.
        progress
            Show a progress bar on standard error; by default for more than 8 prompts on a terminal.

        Raises
        ------
        QuireError
            A prompt can never be served (its message names the field), or the engine failed.
        """
        each = self._params_for(prompts, params)
        prompt_ids = [self._encode(prompt) for prompt in prompts]
        done: queue.SimpleQueue[tuple[int, RequestDelta]] = queue.SimpleQueue()
        outputs: dict[int, RequestOutput] = {}
        order: list[int] = []
        waiting = iter(zip(prompt_ids, each, strict=True))
        window = self._engine.config.max_waiting_requests
        bar = _progress_bar(len(prompts), progress)
        try:
            for ids, p in itertools.islice(waiting, window):
                self._submit(ids, p, done, outputs, order)
            num_left = len(prompts)
            while num_left:
                key, delta = done.get()
                self._collect(outputs[key], delta)
                if delta.finish_reason is None:
                    continue
                num_left -= 1
                bar.update()
                for ids, p in itertools.islice(waiting, 1):
                    self._submit(ids, p, done, outputs, order)
        finally:
            bar.close()
            for key in order:
                if self._sinks.pop(key, None) is not None:
                    self._engine.abort(key)
        tokenizer = self._tokenizer
        for output in outputs.values():
            output.text = tokenizer.decode(output.token_ids) if tokenizer else ""
        return [outputs[key] for key in order]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Iterator[StreamOutput]:
        """Generate for one prompt and yield what each step added; closing the iterator aborts."""
        (p,) = self._params_for([prompt], params)
        done: queue.SimpleQueue[tuple[int, RequestDelta]] = queue.SimpleQueue()
        outputs: dict[int, RequestOutput] = {}
        order: list[int] = []
        self._submit(self._encode(prompt), p, done, outputs, order)
        decode = self._decode_stream()
        try:
            while True:
                key, delta = done.get()
                self._collect(outputs[key], delta)
                yield StreamOutput(delta.token_ids, decode(delta.token_ids), delta.finish_reason)
                if delta.finish_reason is not None:
                    return
        finally:
            if self._sinks.pop(order[0], None) is not None:
                self._engine.abort(order[0])

    def _submit(
        self,
        prompt_ids: np.ndarray,
        params: SamplingParams,
        done: queue.SimpleQueue[tuple[int, RequestDelta]],
        outputs: dict[int, RequestOutput],
        order: list[int],
    ) -> None:
        key = next(self._keys)
        outputs[key] = RequestOutput(prompt_ids.tolist(), [], "", "", 0, params)
        order.append(key)
        self._sinks[key] = done
        self._engine.submit(Request(key, prompt_ids, params))

    @staticmethod
    def _collect(output: RequestOutput, delta: RequestDelta) -> None:
        if delta.error is not None:
            raise delta.error
        if delta.finish_reason == "error":
            raise EngineError("the engine failed without saying why")
        if not output.token_ids:
            output.num_cached_tokens = delta.num_cached_tokens
        output.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            output.logprobs = [*(output.logprobs or ()), *delta.logprobs]
        output.finish_reason = delta.finish_reason or ""

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

    def _encode(self, prompt: Prompt) -> np.ndarray:
        if not isinstance(prompt, str):
            return np.asarray(prompt, dtype=np.int32)
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise ValueError("the checkpoint has no tokenizer.json: give token ids")
        return np.asarray(tokenizer.encode(prompt).ids, dtype=np.int32)

    @property
    def _tokenizer(self) -> Tokenizer | None:
        path = self._engine.checkpoint / "tokenizer.json"
        with self._tokenizer_lock:
            if self._cached_tokenizer is None and path.exists():
                from tokenizers import Tokenizer

                self._cached_tokenizer = Tokenizer.from_file(str(path))
        return self._cached_tokenizer

    def _decode_stream(self):
        tokenizer = self._tokenizer
        if tokenizer is None:
            return lambda token_ids: ""
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=True)
        return lambda token_ids: "".join(stream.step(tokenizer, i) or "" for i in token_ids)


def _progress_bar(total: int, progress: bool | None):
    from tqdm import tqdm

    show = progress if progress is not None else total > 8 and sys.stderr.isatty()
    return tqdm(total=total, disable=not show, unit="request", file=sys.stderr)
