"""Quire's engines behind Ray Serve's own request routers, with a minimal application around them.

    Ingress (HTTP)  ──one handle call per request──▶  EngineServer (engine, tokenizer)
                     placed by one of `ROUTERS`

There is no admission and no validation, so this is the baseline's best case. A text gets its whole answer at once; the
replica tokenises it, as in Ray Serve LLM. Token ids get a stream of token ids. `import_path:
tests.perf.cluster.ray_router_app:build`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pkgutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from quire.protos.sampling_params import SamplingParams
from quire.protos.wire import TokenDelta
from quire.replica.config import EngineArgs
from quire.replica.core.request import Request
from quire.replica.engine import Engine
from quire.replica.loop import LoopOutput
from quire.router.text.tokenizer import AsyncTokenizer, TextTokenizer

# Ray's public class is in `ray.serve.llm`, which imports vLLM; this is its base class with all of its code.
_PREFIX = "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router:PrefixCacheAffinityRouter"
ROUTERS: dict[str, dict[str, Any]] = {
    "power_of_two": {},
    # Ray's documentation uses thresholds of 5 to 20. Without a threshold (the default) all requests with a prefix go
    # to one replica.
    "ray_prefix": {
        "request_router_class": _PREFIX,
        "request_router_kwargs": {"imbalanced_threshold": 10},
    },
}
# The default of a Quire replica.
MAX_ONGOING_REQUESTS = 1024


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """Argument of the handle call. Ray's prefix router looks for an argument with an attribute `prompt`."""

    prompt: str
    max_tokens: int

    @classmethod
    def of_ids(cls, token_ids: list[int], max_tokens: int) -> PromptRequest:
        """A request for token ids, as a text with one character for each."""
        return cls("".join(map(chr, token_ids)), max_tokens)

    @property
    def token_ids(self) -> np.ndarray:
        """[tokens] int32, the ids that `of_ids` got."""
        return np.array([ord(character) for character in self.prompt], np.int32)


class EngineServer:
    """A replica: one engine and its tokenizer.

    Parameters
    ----------
    engine_args
        Fields of `EngineArgs`.
    engine_class
        Module and name of the engine's class.
    """

    async def __init__(
        self, engine_args: dict[str, Any], engine_class: str = "quire.replica.engine:Engine"
    ):
        self._loop = asyncio.get_running_loop()
        self._open: dict[int, asyncio.Queue[TokenDelta]] = {}
        self._keys = itertools.count()
        self._engine: Engine = await asyncio.to_thread(
            pkgutil.resolve_name(engine_class),
            EngineArgs(**engine_args),
            on_output=self._on_output,
        )
        self._tokenizer = AsyncTokenizer(TextTokenizer.load(self._engine.checkpoint), num_threads=2)

    async def complete(self, request: PromptRequest) -> dict[str, Any]:
        """Run a request to its end. Returns the text and the numbers of prompt, cached and output tokens."""
        prompt_ids = await self._tokenizer.encode(
            request.prompt, True, max_model_len=self._engine.config.max_model_len, field="prompt"
        )
        token_ids: list[int] = []
        num_cached = 0
        async for delta in self._deltas(prompt_ids, request.max_tokens):
            if delta.index == 0:
                num_cached = delta.facts.num_cached_tokens
            token_ids += delta.token_ids
        return {
            "text": self._tokenizer.tokenizer.decode(token_ids),
            "prompt_tokens": len(prompt_ids),
            "cached_tokens": num_cached,
            "completion_tokens": len(token_ids),
        }

    async def stream(self, request: PromptRequest) -> AsyncIterator[dict[str, Any]]:
        """Run a request for token ids. Yields this process' id, then the events of the answer."""
        yield {"replica": str(os.getpid())}
        prompt_ids = request.token_ids
        num_tokens = num_cached = num_host_cached = 0
        async for delta in self._deltas(prompt_ids, request.max_tokens):
            if delta.index == 0:
                num_cached, num_host_cached = (
                    delta.facts.num_cached_tokens,
                    delta.facts.num_host_cached_tokens,
                )
            num_tokens += len(delta.token_ids)
            yield {"choices": [{"index": 0, "text": "", "token_ids": delta.token_ids}]}
        details = {"cached_tokens": num_cached, "host_cached_tokens": num_host_cached}
        usage = {"prompt_tokens": len(prompt_ids), "completion_tokens": num_tokens}
        yield {"choices": [], "usage": {**usage, "prompt_tokens_details": details}}

    async def _deltas(self, prompt_ids: np.ndarray, max_tokens: int) -> AsyncIterator[TokenDelta]:
        key = next(self._keys)
        deltas = self._open[key] = asyncio.Queue()
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        try:
            self._engine.submit(Request(key, prompt_ids, params))
            while True:
                delta = await deltas.get()
                if delta.facts.error is not None:
                    raise RuntimeError(delta.facts.error.message)
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            del self._open[key]

    def check_health(self) -> None:
        self._engine.check_health()

    def _on_output(self, output: LoopOutput) -> None:
        """Collect a step's deltas; runs in the engine's thread."""
        self._loop.call_soon_threadsafe(self._take, output)

    def _take(self, output: LoopOutput) -> None:
        for delta in output.deltas:
            deltas = self._open.get(delta.key)
            if deltas is not None:
                deltas.put_nowait(delta)


class Ingress:
    """Answers `POST .../v1/completions` with the events of OpenAI's stream, for a text with all of them at once.

    Parameters
    ----------
    engines
        Handle of the engine deployment.
    """

    def __init__(self, engines: DeploymentHandle):
        self._engines = engines

    async def __call__(self, request: HttpRequest) -> Response:
        body = orjson.loads(await request.body())
        if isinstance(body["prompt"], list):
            return await self._stream(PromptRequest.of_ids(body["prompt"], body["max_tokens"]))
        asked = PromptRequest(body["prompt"], body["max_tokens"])
        return Response(events(await self._engines.complete.remote(asked)), 200, _HEADERS)

    async def _stream(self, asked: PromptRequest) -> Response:
        chunks = self._engines.options(stream=True).stream.remote(asked)
        replica = (await anext(chunks))["replica"]

        async def lines() -> AsyncIterator[bytes]:
            async for chunk in chunks:
                yield b"data: " + orjson.dumps(chunk) + b"\n\n"
            yield b"data: [DONE]\n\n"

        return StreamingResponse(lines(), 200, {**_HEADERS, "x-quire-replica": replica})


_HEADERS = {"content-type": "text/event-stream"}


def events(answer: dict[str, Any]) -> bytes:
    """The body of an answer in the form that `clients.OpenAIClient` reads."""
    usage = {
        "prompt_tokens": answer["prompt_tokens"],
        "completion_tokens": answer["completion_tokens"],
        "prompt_tokens_details": {"cached_tokens": answer["cached_tokens"]},
    }
    choice = {"index": 0, "text": answer["text"], "finish_reason": "length"}
    chunks = ({"choices": [choice]}, {"choices": [], "usage": usage})
    data = b"".join(b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks)
    return data + b"data: [DONE]\n\n"


def build(args: dict[str, Any]) -> Application:
    """Build the application.

    Parameters
    ----------
    args
        `router` (one of `ROUTERS`), `replicas`, `routers`, `num_cpus` of each actor, `engine` (fields of `EngineArgs`),
        and perhaps `engine_class` (see `EngineServer`).
    """
    engine_class = {"engine_class": args["engine_class"]} if "engine_class" in args else {}
    options = {"ray_actor_options": {"num_cpus": args["num_cpus"]}}
    engines = serve.deployment(
        EngineServer,
        name="Replica",
        num_replicas=args["replicas"],
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        request_router_config=RequestRouterConfig(**ROUTERS[args["router"]]),
        **options,
    ).bind(args["engine"], **engine_class)
    return serve.deployment(
        Ingress,
        name="Router",
        num_replicas=args["routers"],
        max_ongoing_requests=args["replicas"] * MAX_ONGOING_REQUESTS,
        **options,
    ).bind(engines)
