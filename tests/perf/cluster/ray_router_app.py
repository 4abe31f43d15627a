"""Quire's engines behind Ray Serve's own request routers, with a minimal application around them.

    Ingress (HTTP)  ──one unary handle call per request──▶  EngineServer (engine, tokenizer)
                     placed by one of `ROUTERS`

There is no admission, no validation and no stream between the two, so this is the baseline's best case. The replica
tokenises the text, as in Ray Serve LLM. `import_path: tests.perf.cluster.ray_router_app:build`.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from typing import Any

import orjson
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quire.protos.wire import SamplingParams
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


@dataclass(slots=True)
class _Open:
    """A request without its complete answer."""

    answer: asyncio.Future[dict[str, Any]]
    token_ids: list[int]
    num_cached: int = 0


class EngineServer:
    """A replica: one engine and its tokenizer.

    Parameters
    ----------
    engine_args
        Fields of `EngineArgs`.
    """

    async def __init__(self, engine_args: dict[str, Any]):
        self._loop = asyncio.get_running_loop()
        self._open: dict[int, _Open] = {}
        self._keys = itertools.count()
        self._engine = await asyncio.to_thread(
            Engine, EngineArgs(**engine_args), on_output=self._on_output
        )
        self._tokenizer = AsyncTokenizer(TextTokenizer.load(self._engine.checkpoint), num_threads=2)

    async def complete(self, request: PromptRequest) -> dict[str, Any]:
        """Run a request to its end. Returns the text and the numbers of prompt, cached and output tokens."""
        prompt_ids = await self._tokenizer.encode(
            request.prompt, True, max_model_len=self._engine.config.max_model_len, field="prompt"
        )
        key = next(self._keys)
        entry = self._open[key] = _Open(self._loop.create_future(), [])
        params = SamplingParams(max_tokens=request.max_tokens, temperature=0, ignore_eos=True)
        try:
            self._engine.submit(Request(key, prompt_ids, params))
            await entry.answer
        finally:
            del self._open[key]
        return {
            "text": self._tokenizer.tokenizer.decode(entry.token_ids),
            "prompt_tokens": len(prompt_ids),
            "cached_tokens": entry.num_cached,
            "completion_tokens": len(entry.token_ids),
        }

    def check_health(self) -> None:
        self._engine.check_health()

    def _on_output(self, output: LoopOutput) -> None:
        """Collect a step's deltas; runs in the engine's thread."""
        self._loop.call_soon_threadsafe(self._take, output)

    def _take(self, output: LoopOutput) -> None:
        for delta in output.deltas:
            entry = self._open.get(delta.key)
            if entry is None:
                continue
            if delta.index == 0:
                entry.num_cached = delta.num_cached_tokens
            entry.token_ids += delta.token_ids
            if delta.error is not None:
                entry.answer.set_exception(RuntimeError(delta.error.message))
            elif delta.finish_reason is not None:
                entry.answer.set_result({})


class Ingress:
    """Answers `POST .../v1/completions` with all events of OpenAI's stream at once.

    Parameters
    ----------
    engines
        Handle of the engine deployment.
    """

    def __init__(self, engines: DeploymentHandle):
        self._engines = engines

    async def __call__(self, request: HttpRequest) -> Response:
        body = orjson.loads(await request.body())
        asked = PromptRequest(body["prompt"], body["max_tokens"])
        return Response(events(await self._engines.complete.remote(asked)), 200, _HEADERS)


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
        `router` (one of `ROUTERS`), `replicas`, `routers`, `num_cpus` of each actor, `engine` (fields of `EngineArgs`).
    """
    options = {"ray_actor_options": {"num_cpus": args["num_cpus"]}}
    engines = serve.deployment(
        EngineServer,
        name="Replica",
        num_replicas=args["replicas"],
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        request_router_config=RequestRouterConfig(**ROUTERS[args["router"]]),
        **options,
    ).bind(args["engine"])
    return serve.deployment(
        Ingress,
        name="Router",
        num_replicas=args["routers"],
        max_ongoing_requests=args["replicas"] * MAX_ONGOING_REQUESTS,
        **options,
    ).bind(engines)
