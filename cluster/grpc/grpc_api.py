"""The gRPC front end: `quire.v1.Generation`, `quire.v1.Control` and `grpc.health.v1.Health`.

Ray Serve calls the ingress deployment's method with the RPC's name, the request and a `grpc_context`, a picklable copy
of grpc.aio's context. Two properties of Serve shape this file (Ray 2.60):

- Serve always sends the context's code and details, but it sends the trailing metadata only with a message or at a
  normal end. So a failed unary call does not raise: it sets the status and returns an empty message. gRPC drops this
  message, and the metadata arrives. A failed stream must raise, because Ray's own proxy would report success otherwise.
  Its metadata is lost; its details describe the error.
- The context has no deadline. When the client's deadline passes, Serve cancels the call, which ends the request. To let
  the engine refuse or end the request with the error DEADLINE_EXCEEDED, a client sends the seconds in the metadata
  `x-request-timeout-seconds`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from quire.cluster.api_common.front_end import check_model, collect, counting_refusals, renamed
from quire.cluster.api_common.watchers import FORWARDED_FOR, Watchers, client_of
from quire.cluster.auth.access_control import AccessControl, secret_of_metadata
from quire.cluster.auth.access_rules import grpc_rule
from quire.cluster.grpc.grpc_answers import (
    Responses,
    adapter_message,
    answer_fields,
    prompt_scores,
    replica_cache,
    replica_load,
    router_state,
    set_explain,
    set_finish,
    set_status,
    set_usage,
)
from quire.cluster.grpc.grpc_requests import (
    INPUT_NAMES,
    Context,
    embed_request,
    generation_request,
    period_s,
    tokenize_request,
)
from quire.cluster.grpc.grpc_servicers import Unparsed, accepted
from quire.protos import control_pb2 as control
from quire.protos import generation_pb2 as generation
from quire.protos.errors import InvalidRequest, QuireError, shown
from quire.protos.field_checks import at_most
from quire.router.request import resume
from quire.router.request.params import DEFAULT_LIMITS
from quire.router.types import Service

GENERATION = generation.DESCRIPTOR.services_by_name["Generation"].full_name
CONTROL = control.DESCRIPTOR.services_by_name["Control"].full_name
HEALTH_POLL_S = 1.0

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class RpcFailed(Exception):
    """Ends a streaming call after its status has been set on the context."""


def _unary(response: type[Message], *, generates: bool = False) -> Callable[[Callable], Callable]:
    """Decorate a unary method: the call needs the right of the method, and errors become its status.

    Parameters
    ----------
    response
        Type of the method's response.
    generates
        Whether a request that is too large counts as a refused generation request.
    """

    def decorate(method: Callable[..., Awaitable[Message]]) -> Callable[..., Awaitable[Message]]:
        @functools.wraps(method)
        async def call(self: GrpcApi, request: Message, grpc_context: Context) -> Message:
            try:
                self._service_for(grpc_context, method.__name__)
                with counting_refusals(self.service) if generates else nullcontext():
                    accepted(request)
                return await method(self, request, grpc_context)
            except Exception as error:
                set_status(grpc_context, error)
                return response()

        return call

    return decorate


class GrpcApi:
    """Mix-in for the ingress deployment, which sets `service` and `watchers`, and `access` if keys are configured.

    A method that generates gets the service from `_service_for`, so that its caller pays.

    Every RPC method takes the request message and the call's context; Serve requires the name `grpc_context`.
    """

    service: Service
    watchers: Watchers
    access: AccessControl | None = None

    def is_direct_call(self) -> bool:
        """Whether the current call came to this process directly from the client, not through Serve's proxy.

        A failed stream of a direct call ends without an exception, so that Serve sends the context's trailing metadata,
        such as the time to retry. Behind the proxy this is impossible: the proxy receives the context only with
        messages, and a stream without messages can report its status only by an exception, without metadata. False is
        always safe; it only loses the metadata.
        """
        return False

    def _service_for(self, context: Context, method: str) -> Service:
        """Return the service as the key of a call may use it.

        Parameters
        ----------
        method
            The method's name; `access_rules` has the right that it needs.

        Raises
        ------
        Unauthenticated, PermissionDenied
            See `AccessControl.caller`.
        """
        if self.access is None:
            return self.service
        secret = secret_of_metadata(context.invocation_metadata())
        return self.access.service(self.service, self.access.caller(secret, grpc_rule(method)))

    @contextmanager
    def _streaming(self, context: Context) -> Iterator[None]:
        """Turn errors of a streaming method into the status of the call.

        Methods use this context manager instead of a decorator, because with a decorator every token of every stream
        would pass through one more generator.
        """
        try:
            yield
        except Exception as error:
            message = set_status(context, error).message
            if not self.is_direct_call():
                # `from None`: Serve logs exception chains, and a client's mistake needs no traceback.
                raise RpcFailed(message) from None

    def _watching(self, context: Context) -> AbstractContextManager[None]:
        """Count a stream that watches state and ends only when its client ends it, within the limits of `Watchers`."""
        values = [value for key, value in context.invocation_metadata() if key == FORWARDED_FOR]
        return self.watchers.watching(client_of(context.peer(), values))

    # -- quire.v1.Generation -----------------------------------------------------------------------

    async def Generate(
        self, request: generation.GenerateRequest, grpc_context: Context
    ) -> AsyncGenerator[generation.GenerateResponse, None]:
        """Stream the answer: one message for each delta."""
        with self._streaming(grpc_context):
            service = self._service_for(grpc_context, "Generate")
            with counting_refusals(self.service):
                accepted(request)
                asked = generation_request(request, grpc_context)
                if request.resume_from:
                    point = resume.parse(request.resume_from, "resume_from")
                    asked = dataclasses.replace(asked, resume_from=point)
            stream = await service.generate(asked)
            try:
                responses = Responses(stream, asked)
                async for delta in stream:
                    response = responses.of(delta)
                    if responses.are_complete:
                        # Set before the last message: Ray's own proxy sends metadata only with a message.
                        set_explain(grpc_context, stream.explain)
                    yield response
                responses.end()
            finally:
                await stream.aclose()

    @_unary(generation.GenerateOnceResponse, generates=True)
    async def GenerateOnce(
        self, request: generation.GenerateRequest, grpc_context: Context
    ) -> generation.GenerateOnceResponse:
        """Return the whole answer in one message."""
        with counting_refusals(self.service):
            asked = generation_request(request, grpc_context)
            if request.resume_from:
                raise InvalidRequest(
                    "only Generate can resume a stream: resume_from must be empty for GenerateOnce, got "
                    f"{shown(request.resume_from)}",
                    field="resume_from",
                )
        stream = await self._service_for(grpc_context, "GenerateOnce").generate(asked)
        try:
            answer, *others = await collect(stream, asked.n)
        finally:
            await stream.aclose()
        response = generation.GenerateOnceResponse(
            seed=stream.origin.seed,
            request_id=stream.request_id,
            model=stream.model,
            prompt_logprobs=prompt_scores(stream),
            **answer_fields(answer),
        )
        set_finish(response, answer)
        for other in others:
            choice = response.more_choices.add(**answer_fields(other))
            set_finish(choice, other)
        set_usage(response, stream.usage)
        set_explain(grpc_context, stream.explain)
        return response

    @_unary(generation.EmbedResponse, generates=True)
    async def Embed(
        self, request: generation.EmbedRequest, grpc_context: Context
    ) -> generation.EmbedResponse:
        """Return the embedding of each input."""
        with counting_refusals(self.service):
            asked = embed_request(request, grpc_context)
        dimensions = request.dimensions if request.HasField("dimensions") else None
        try:
            found = await self._service_for(grpc_context, "Embed").embed(asked, dimensions)
        except QuireError as error:
            raise renamed(error, INPUT_NAMES) from None
        response = generation.EmbedResponse(
            request_id=asked.request_id, model=asked.model or self.service.model_info().name
        )
        for vector in found.vectors:
            response.embeddings.add(values=vector.tolist())
            # Let other tasks run between two vectors.
            await asyncio.sleep(0)
        set_usage(response, found.usage)
        set_explain(grpc_context, found.explain)
        return response

    @_unary(generation.RenderResponse)
    async def Render(
        self, request: generation.GenerateRequest, grpc_context: Context
    ) -> generation.RenderResponse:
        """Return the prompt of a request as a replica would compute it."""
        service = self._service_for(grpc_context, "Render")
        encoded = await service.encode(generation_request(request, grpc_context))
        return generation.RenderResponse(
            text=encoded.text or "",
            token_ids=encoded.token_ids.tolist(),
            max_model_len=encoded.max_model_len,
            model=self.service.model_info().name,
        )

    @_unary(generation.TokenizeResponse)
    async def Tokenize(
        self, request: generation.TokenizeRequest, grpc_context: Context
    ) -> generation.TokenizeResponse:
        """Return the token ids of a text or of chat turns."""
        service = self._service_for(grpc_context, "Tokenize")
        encoded = await service.encode(tokenize_request(request, grpc_context))
        ids = encoded.token_ids.tolist()
        strs = await service.tokens(ids) if request.return_token_strs else ()
        return generation.TokenizeResponse(
            token_ids=ids, token_strs=strs, max_model_len=encoded.max_model_len
        )

    @_unary(generation.DetokenizeResponse)
    async def Detokenize(
        self, request: generation.DetokenizeRequest, grpc_context: Context
    ) -> generation.DetokenizeResponse:
        """Return the text of token ids."""
        check_model(self.service, request.model or None)
        at_most("token_ids", len(request.token_ids), DEFAULT_LIMITS.max_prompt_ids, "token ids")
        text = await self.service.decode(
            request.token_ids, skip_special_tokens=request.skip_special_tokens
        )
        return generation.DetokenizeResponse(text=text)

    # -- quire.v1.Control --------------------------------------------------------------------------

    @_unary(control.GetModelInfoResponse)
    async def GetModelInfo(
        self, request: control.GetModelInfoRequest, grpc_context: Context
    ) -> control.GetModelInfoResponse:
        """Return facts about the model."""
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

    @_unary(control.ListAdaptersResponse)
    async def ListAdapters(
        self, request: control.ListAdaptersRequest, grpc_context: Context
    ) -> control.ListAdaptersResponse:
        """Return the adapters that requests may name as their model."""
        adapters = self.service.adapters()
        return control.ListAdaptersResponse(adapters=[adapter_message(entry) for entry in adapters])

    @_unary(control.LoadAdapterResponse)
    async def LoadAdapter(
        self, request: control.LoadAdapterRequest, grpc_context: Context
    ) -> control.LoadAdapterResponse:
        """Load an adapter on all replicas."""
        entry = await self.service.load_adapter(request.name, request.path)
        return control.LoadAdapterResponse(adapter=adapter_message(entry))

    @_unary(control.UnloadAdapterResponse)
    async def UnloadAdapter(
        self, request: control.UnloadAdapterRequest, grpc_context: Context
    ) -> control.UnloadAdapterResponse:
        """Unload an adapter."""
        await self.service.unload_adapter(request.name)
        return control.UnloadAdapterResponse()

    @_unary(control.GetLoadsResponse)
    async def GetLoads(
        self, request: control.GetLoadsRequest, grpc_context: Context
    ) -> control.GetLoadsResponse:
        """Return the load of each replica."""
        return control.GetLoadsResponse(
            replicas=[replica_load(status) for status in self.service.replicas()]
        )

    async def WatchCache(
        self, request: control.WatchCacheRequest, grpc_context: Context
    ) -> AsyncGenerator[control.WatchCacheResponse, None]:
        """Stream the cache occupancy of each replica and tier."""
        with self._streaming(grpc_context), self._watching(grpc_context):
            service = self._service_for(grpc_context, "WatchCache")
            accepted(request)
            async with aclosing(service.watch_cache(period_s(request))) as updates:
                async for statuses in updates:
                    yield control.WatchCacheResponse(
                        replicas=[replica_cache(status) for status in statuses]
                    )

    async def WatchRouter(
        self, request: control.WatchRouterRequest, grpc_context: Context
    ) -> AsyncGenerator[control.WatchRouterResponse, None]:
        """Stream what this router knows."""
        with self._streaming(grpc_context), self._watching(grpc_context):
            service = self._service_for(grpc_context, "WatchRouter")
            accepted(request)
            interval_s = period_s(request)
            while True:
                yield router_state(await service.live_state())
                await asyncio.sleep(interval_s)

    # -- grpc.health.v1.Health ---------------------------------------------------------------------

    async def Check(
        self, request: health_pb2.HealthCheckRequest, grpc_context: Context
    ) -> health_pb2.HealthCheckResponse:
        """Return whether a service would serve a call made now."""
        if isinstance(request, Unparsed):
            set_status(grpc_context, request.error)
            return health_pb2.HealthCheckResponse()
        status = self._health(request.service)
        if status == _SERVICE_UNKNOWN:
            grpc_context.set_code(grpc.StatusCode.NOT_FOUND)
            grpc_context.set_details(f"unknown service {request.service[:128]!r}")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, grpc_context: Context
    ) -> AsyncGenerator[health_pb2.HealthCheckResponse, None]:
        """Stream the status: now, and after each change."""
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
        # The Control service answers as long as this process runs, also without replicas.
        if service_name == CONTROL:
            return _SERVING
        if service_name in ("", GENERATION):
            return _SERVING if self.service.readiness().ready else _NOT_SERVING
        return _SERVICE_UNKNOWN
