"""The gRPC front end: `quire.v1.Generation`, `quire.v1.Control` and `grpc.health.v1.Health`.

Ray Serve calls the ingress deployment's method of the RPC's name with the request and a
`grpc_context`, a picklable copy of grpc.aio's. Two of its habits shape this file (Ray 2.60):

- It sends the context's code and details in every case, but its trailing metadata only with a
  message or with a normal end. So a unary call does not raise: it sets the status and returns an
  empty message, which gRPC drops, and its metadata arrives. A stream has to raise (Ray's own proxy
  would report success otherwise), and the metadata of a failed stream is lost; its details say in
  words what went wrong.
- The context does not tell the deadline. When the client's deadline passes Serve cancels the call,
  and that ends the request. A client that wants it refused or ended by the engine itself, with the error
  DEADLINE_EXCEEDED, gives the seconds in the metadata `x-request-timeout-seconds`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext
from typing import Any, Protocol

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from quire.cluster.api_common import structured_output
from quire.cluster.api_common.front_end import (
    TIMEOUT_HEADER,
    Progress,
    collect,
    counting_refusals,
    explain_headers,
    internal_error,
    is_label,
    renamed,
    request_label,
    retry_after_ms,
    served_role,
    timeout_seconds,
)
from quire.cluster.api_common.watchers import FORWARDED_FOR, Watchers, client_of
from quire.cluster.grpc.grpc_servicers import Unparsed, accepted
from quire.protos import control_pb2 as control
from quire.protos import generation_pb2 as generation
from quire.protos.errors import InvalidRequest, QuireError, shown
from quire.protos.field_checks import at_most
from quire.protos.sampling_bounds import MAX_ALLOWED_TOKEN_IDS
from quire.protos.wire import Grammar, Load
from quire.router.request import resume
from quire.router.request.params import DEFAULT_LIMITS
from quire.router.request.resume import EventIds
from quire.router.text.template_kwargs import parse_template_kwargs
from quire.router.types import (
    GenerationRequest,
    GenerationStream,
    OutputDelta,
    ReplicaStatus,
    ScoredToken,
    Service,
    TokenScores,
    Usage,
)

GENERATION = generation.DESCRIPTOR.services_by_name["Generation"].full_name
CONTROL = control.DESCRIPTOR.services_by_name["Control"].full_name
HEALTH_POLL_S = 1.0
MIN_PERIOD_MS, DEFAULT_PERIOD_MS, MAX_PERIOD_MS = 100, 1000, 60_000

_FINISH_REASONS = {
    "stop": generation.FINISH_REASON_STOP,
    "length": generation.FINISH_REASON_LENGTH,
}
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


# The router's names of fields, where the API has others.
_NAMES = {"tenant": "cache_salt", "deadline_s": TIMEOUT_HEADER, "timeout": TIMEOUT_HEADER}


class Context(Protocol):
    """The part of Serve's `RayServegRPCContext` in use; without it, this module needs no Ray."""

    def set_code(self, code: grpc.StatusCode) -> None: ...

    def set_details(self, details: str) -> None: ...

    def set_trailing_metadata(self, metadata: list[tuple[str, str]]) -> None: ...

    def invocation_metadata(self) -> Any: ...

    def peer(self) -> str: ...


class RpcFailed(Exception):
    """Ends a streaming call whose status is set on its context."""


def _unary(response: type[Message], *, generates: bool = False) -> Callable[[Callable], Callable]:
    """Make errors of a unary method the call's status.

    Parameters
    ----------
    generates
        Whether a request that is too large counts as a generation request that was refused.
    """

    def decorate(method: Callable[..., Awaitable[Message]]) -> Callable[..., Awaitable[Message]]:
        @functools.wraps(method)
        async def call(self: GrpcApi, request: Message, grpc_context: Context) -> Message:
            try:
                with counting_refusals(self.service) if generates else nullcontext():
                    accepted(request)
                return await method(self, request, grpc_context)
            except Exception as error:
                _set_status(grpc_context, error)
                return response()

        return call

    return decorate


class GrpcApi:
    """Mix-in for the ingress deployment, which has the `service`.

    Every method takes the request message and the call's context, named as Serve wants it.
    """

    service: Service
    watchers: Watchers

    def is_direct_call(self) -> bool:
        """Whether the call that runs came from its client to this process, and not by Serve's proxy.

        Then a stream that has failed ends as if it had not: only so Serve sends what the context has of trailing
        metadata, such as when to come again. The proxy hears of the context with messages only, and of one that had
        none by an exception, which loses the metadata. False is right for both but for that.
        """
        return False

    @contextmanager
    def _streaming(self, context: Context) -> Iterator[None]:
        """Make errors of a streaming method the call's status.

        Around its body and not around the method: every token of every stream would pass one more generator.
        """
        try:
            yield
        except Exception as error:
            message = _set_status(context, error).message
            if not self.is_direct_call():
                # `from None`: Serve logs the chain, and a client's mistake is no traceback.
                raise RpcFailed(message) from None

    def _watching(self, context: Context) -> AbstractContextManager[None]:
        """Count a stream that lasts as long as its client likes."""
        values = [value for key, value in context.invocation_metadata() if key == FORWARDED_FOR]
        return self.watchers.watching(client_of(context.peer(), values))

    # -- quire.v1.Generation -----------------------------------------------------------------------

    async def Generate(
        self, request: generation.GenerateRequest, grpc_context: Context
    ) -> AsyncGenerator[generation.GenerateResponse, None]:
        """Stream the answer, one message per delta."""
        with self._streaming(grpc_context):
            with counting_refusals(self.service):
                accepted(request)
                asked = _generation_request(request, grpc_context)
                if request.resume_from:
                    point = resume.parse(request.resume_from, "resume_from")
                    asked = dataclasses.replace(asked, resume_from=point)
            stream = await self.service.generate(asked)
            try:
                responses = _Responses(stream, asked)
                async for delta in stream:
                    response = responses.of(delta)
                    if responses.are_complete:
                        # Before the last message: Ray's own proxy sends metadata only along with one.
                        _set_explain(grpc_context, stream.explain)
                    yield response
                responses.end()
            finally:
                await stream.aclose()

    @_unary(generation.GenerateOnceResponse, generates=True)
    async def GenerateOnce(
        self, request: generation.GenerateRequest, grpc_context: Context
    ) -> generation.GenerateOnceResponse:
        """The whole answer in one message."""
        with counting_refusals(self.service):
            asked = _generation_request(request, grpc_context)
            if request.resume_from:
                raise InvalidRequest(
                    "only streams are resumed, by Generate: resume_from must be empty for GenerateOnce, got "
                    f"{shown(request.resume_from)}",
                    field="resume_from",
                )
        stream = await self.service.generate(asked)
        try:
            answer, *others = await collect(stream, asked.n)
        finally:
            await stream.aclose()
        response = generation.GenerateOnceResponse(
            text=answer.text,
            token_ids=answer.token_ids,
            seed=stream.origin.seed,
            request_id=stream.request_id,
            model=stream.model,
            logprobs=_scores(answer.logprobs),
            prompt_logprobs=_prompt_scores(stream),
        )
        _set_finish(response, answer)
        for other in others:
            choice = response.more_choices.add(
                text=other.text, token_ids=other.token_ids, logprobs=_scores(other.logprobs)
            )
            _set_finish(choice, other)
        _set_usage(response, stream.usage)
        _set_explain(grpc_context, stream.explain)
        return response

    # -- quire.v1.Control --------------------------------------------------------------------------

    @_unary(control.GetModelInfoResponse)
    async def GetModelInfo(
        self, request: control.GetModelInfoRequest, grpc_context: Context
    ) -> control.GetModelInfoResponse:
        """Facts about the model."""
        info = self.service.model_info()
        return control.GetModelInfoResponse(
            name=info.name,
            revision=info.revision,
            created_s=info.created_s,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            dtype=info.dtype,
            eos_token_ids=info.eos_token_ids,
            block_size=info.block_size,
        )

    @_unary(control.GetLoadsResponse)
    async def GetLoads(
        self, request: control.GetLoadsRequest, grpc_context: Context
    ) -> control.GetLoadsResponse:
        """What each replica is doing."""
        return control.GetLoadsResponse(
            replicas=[_replica_load(status) for status in self.service.replicas()]
        )

    async def WatchCache(
        self, request: control.WatchCacheRequest, grpc_context: Context
    ) -> AsyncGenerator[control.WatchCacheResponse, None]:
        """Occupancy per replica and tier, as it changes."""
        with self._streaming(grpc_context), self._watching(grpc_context):
            accepted(request)
            async with aclosing(self.service.watch_cache(_period_s(request))) as updates:
                async for statuses in updates:
                    yield control.WatchCacheResponse(
                        replicas=[_replica_cache(status) for status in statuses]
                    )

    # -- grpc.health.v1.Health ---------------------------------------------------------------------

    async def Check(
        self, request: health_pb2.HealthCheckRequest, grpc_context: Context
    ) -> health_pb2.HealthCheckResponse:
        """Whether a service would serve a call made now."""
        if isinstance(request, Unparsed):
            _set_status(grpc_context, request.error)
            return health_pb2.HealthCheckResponse()
        status = self._health(request.service)
        if status == _SERVICE_UNKNOWN:
            grpc_context.set_code(grpc.StatusCode.NOT_FOUND)
            grpc_context.set_details(f"unknown service {request.service[:128]!r}")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, grpc_context: Context
    ) -> AsyncGenerator[health_pb2.HealthCheckResponse, None]:
        """The status now, and again whenever it has changed."""
        with self._streaming(grpc_context), self._watching(grpc_context):
            accepted(request)
            last = None
            while True:
                status = self._health(request.service)
                if status != last:
                    last = status
                    yield health_pb2.HealthCheckResponse(status=status)
                await asyncio.sleep(HEALTH_POLL_S)

    def _health(self, service_name: str) -> int:
        if service_name == CONTROL:  # answers as long as this process does
            return _SERVING
        if service_name in ("", GENERATION):
            return _SERVING if self.service.readiness().ready else _NOT_SERVING
        return _SERVICE_UNKNOWN


# --------------------------------------------------------------------------------------------------
# Requests
# --------------------------------------------------------------------------------------------------


def _generation_request(request: generation.GenerateRequest, context: Context) -> GenerationRequest:
    """The request for the router, which checks all bounds.

    Raises
    ------
    InvalidRequest
        No input, a label that is not printable, an unknown role.
    """
    options = request.sampling
    given = {field.name: value for field, value in options.ListFields()}
    for name in ("allowed_token_ids", "bad_words"):
        given[name] = _bounded(name, getattr(options, name))
    given["logit_bias"] = tuple(sorted(options.logit_bias.items()))
    return GenerationRequest(
        request_id=_request_id(request, context),
        model=request.model or None,
        **_input(request),
        **given,
        n=request.n if request.HasField("n") else 1,
        logprobs=request.logprobs if request.HasField("logprobs") else None,
        prompt_logprobs=request.prompt_logprobs if request.HasField("prompt_logprobs") else None,
        grammar=_grammar(request),
        stop=_bounded("stop", request.stop),
        stop_token_ids=_bounded("stop_token_ids", request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        include_stop_str_in_output=request.include_stop_str_in_output,
        skip_special_tokens=(
            request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        ),
        add_special_tokens=(
            request.add_special_tokens if request.HasField("add_special_tokens") else None
        ),
        tenant=request.cache_salt,
        session=request.session,
        priority=request.priority,
        deadline_s=timeout_seconds(dict(context.invocation_metadata()).get(TIMEOUT_HEADER)),
    )


def _bounded(name: str, values: Sequence[Any]) -> tuple[Any, ...]:
    """A repeated field, before it becomes a Python object for each value. Most have smaller bounds in the router."""
    at_most(name, len(values), MAX_ALLOWED_TOKEN_IDS, "values")
    return tuple(values)


def _period_s(request: control.WatchCacheRequest) -> float:
    period_ms = request.period_ms if request.HasField("period_ms") else DEFAULT_PERIOD_MS
    if not MIN_PERIOD_MS <= period_ms <= MAX_PERIOD_MS:
        raise InvalidRequest(
            f"period_ms must be in [{MIN_PERIOD_MS}, {MAX_PERIOD_MS}], got {period_ms}",
            field="period_ms",
        )
    return period_ms / 1000


def _input(request: generation.GenerateRequest) -> dict[str, Any]:
    kind = request.WhichOneof("input")
    if kind == "prompt":
        return {"prompt": request.prompt}
    if kind == "token_ids":
        ids = request.token_ids.ids
        at_most("token_ids", len(ids), DEFAULT_LIMITS.max_prompt_ids, "token ids")
        return {"prompt": tuple(ids)}
    if kind == "messages":
        num_messages = len(request.messages.messages)
        at_most("messages", num_messages, DEFAULT_LIMITS.max_messages, "messages")
        turns = tuple(map(_turn, range(1 << 31), request.messages.messages))
        return {"messages": turns, **_template_options(request.messages)}
    raise InvalidRequest("input is required: one of prompt, token_ids and messages", field="input")


def _template_options(chat: generation.ChatMessages) -> dict[str, Any]:
    """How messages become a prompt."""
    options: dict[str, Any] = {"continue_final_message": chat.continue_final_message}
    if chat.HasField("add_generation_prompt"):
        options["add_generation_prompt"] = chat.add_generation_prompt
    if chat.chat_template_kwargs:
        options["chat_template_kwargs"] = parse_template_kwargs(chat.chat_template_kwargs)
    return options


def _grammar(request: generation.GenerateRequest) -> Grammar | None:
    if not request.HasField("structured_output"):
        return None
    asked = request.structured_output
    kind = asked.WhichOneof("kind")
    field = f"structured_output.{kind}"
    if kind == "json_schema":
        return structured_output.json_schema(asked.json_schema, field)
    if kind == "json_object" and asked.json_object:
        return structured_output.json_object(field)
    if kind == "choice":
        return structured_output.choice(list(asked.choice.texts), field)
    if kind == "regex":
        return Grammar("regex", asked.regex, field)
    if kind == "grammar":
        return Grammar("lark", asked.grammar, field)
    raise InvalidRequest(
        "structured_output must have one of json_schema, json_object, regex, choice and grammar, got none",
        field="structured_output",
    )


def _turn(i: int, message: generation.ChatMessage) -> dict[str, str]:
    role = served_role(message.role, f"messages[{i}].role")
    turn = {"role": role, "content": message.content}
    if message.name:
        turn["name"] = message.name
    return turn


def _request_id(request: generation.GenerateRequest, context: Context) -> str:
    if request.request_id:
        return request_label(request.request_id, "request_id")
    for key, value in context.invocation_metadata():
        # One that cannot be logged is replaced, as over HTTP.
        if key == "x-request-id" and is_label(value):
            return value
    return uuid.uuid4().hex


# --------------------------------------------------------------------------------------------------
# Answers
# --------------------------------------------------------------------------------------------------


class _Responses:
    """The messages of one stream, made of its deltas in their order."""

    def __init__(self, stream: GenerationStream, asked: GenerationRequest):
        marks = asked.marks
        self._stream = stream
        self._is_resumed = asked.resume_from is not None
        self._ids = EventIds(stream.origin, marks)
        self._told = [mark.num_tokens for mark in marks]  # by choice: the client has them
        self._sent = [Progress() for _ in marks]
        self._unfinished = [
            progress for progress, mark in zip(self._sent, marks, strict=True) if not mark.finished
        ]
        self._num_open = len(self._unfinished)
        self._is_first = True
        self.are_complete = not self._unfinished  # the last one is made

    def of(self, delta: OutputDelta) -> generation.GenerateResponse:
        """Runs for every token of every stream: setting fields takes half the time of naming them to the
        constructor, and those that few messages have are left alone."""
        choice = delta.choice
        progress = self._sent[choice]
        index = self._told[choice] + progress.num_tokens
        progress.add(delta)
        response = generation.GenerateResponse()
        response.text = delta.text
        response.token_ids.extend(delta.token_ids)
        response.index = index
        if choice:
            response.choice = choice
        response.event_id = self._ids.after(delta)
        if delta.logprobs is not None:
            response.logprobs.extend(_scores(delta.logprobs))
        if self._is_first:
            self._is_first = False
            self._introduce(response)
        if delta.finish_reason is not None:
            _set_finish(response, progress)
            self._num_open -= 1
            self.are_complete = not self._num_open
        if self.are_complete:
            _set_usage(response, self._stream.usage)
        return response

    def _introduce(self, response: generation.GenerateResponse) -> None:
        """What the first message tells of the whole stream."""
        stream = self._stream
        response.seed = stream.origin.seed
        response.request_id = stream.request_id
        response.model = stream.model
        if not self._is_resumed:
            response.prompt_logprobs.extend(_prompt_scores(stream))

    def end(self) -> None:
        """The stream has ended: check that every choice has."""
        for progress in self._unfinished:
            progress.end()


def _set_finish(
    response: generation.GenerateResponse | generation.GenerateOnceResponse | generation.Choice,
    ended: Progress,
) -> None:
    response.finish_reason = _FINISH_REASONS[ended.finish_reason]
    if isinstance(ended.stop_reason, str):
        response.stop_string = ended.stop_reason
    elif ended.stop_reason is not None:
        response.stop_token_id = ended.stop_reason


def _scores(scores: list[TokenScores] | None) -> list[generation.TokenScores]:
    def scored(token: ScoredToken) -> generation.ScoredToken:
        return generation.ScoredToken(
            token_id=token.token_id, logprob=token.logprob, utf8=token.utf8
        )

    return [
        generation.TokenScores(
            token=scored(of_token.token), top=map(scored, of_token.top), rank=of_token.rank
        )
        for of_token in scores or ()
    ]


def _prompt_scores(stream: GenerationStream) -> list[generation.TokenScores]:
    """Without the first token, which has no log-probability."""
    return _scores((stream.prompt_scores or [])[1:])


def _set_usage(
    response: generation.GenerateResponse | generation.GenerateOnceResponse, usage: Usage
) -> None:
    response.usage.prompt_tokens = usage.prompt_tokens
    response.usage.completion_tokens = usage.completion_tokens
    response.usage.cached_tokens = usage.cached_tokens
    response.usage.host_cached_tokens = usage.host_cached_tokens


def _set_explain(context: Context, explain: Any) -> None:
    context.set_trailing_metadata(list(explain_headers(explain, complete=True).items()))


def _set_status(context: Context, error: Exception) -> QuireError:
    """Put an error into the call's status and trailing metadata."""
    error = renamed(error, _NAMES) if isinstance(error, QuireError) else internal_error(error)
    context.set_code(grpc.StatusCode[error.grpc_status])
    context.set_details(error.message)
    metadata = [("x-quire-error-code", error.code)]
    if error.field is not None:
        metadata.append(("x-quire-error-field", error.field))
    if error.retry_after_s is not None:
        metadata.append(("grpc-retry-pushback-ms", str(retry_after_ms(error.retry_after_s))))
    context.set_trailing_metadata(metadata)
    return error


def _replica_load(status: ReplicaStatus) -> control.ReplicaLoad:
    load = status.load
    return control.ReplicaLoad(
        replica=status.replica,
        epoch=status.epoch,
        attached=status.attached,
        report_age_ms=status.report_age_s * 1000,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        queued_prefill_tokens=load.queued_prefill_tokens,
        num_decode_tokens=load.num_decode_tokens,
        prefill_ms_per_token=load.prefill_s_per_token * 1000,
        decode_step_ms=load.decode_step_s * 1000,
        num_steps=load.num_steps,
        num_compiles=load.num_compiles,
        num_preemptions=load.num_preemptions,
        cache=_occupancy(load),
    )


def _replica_cache(status: ReplicaStatus) -> control.ReplicaCache:
    return control.ReplicaCache(
        replica=status.replica,
        epoch=status.epoch,
        attached=status.attached,
        report_age_ms=status.report_age_s * 1000,
        cache=_occupancy(status.load),
        indexed_blocks=status.indexed_blocks,
    )


def _occupancy(load: Load) -> control.CacheOccupancy:
    """The tiers that replicas report; so far the device's."""
    device = control.TierOccupancy(
        tier=control.TIER_DEVICE,
        blocks_free=load.blocks_free,
        blocks_cached=load.blocks_cached,
        blocks_in_use=load.blocks_in_use,
        blocks_total=load.blocks_total,
    )
    return control.CacheOccupancy(tiers=[device])
