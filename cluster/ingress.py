"""The router's Serve deployment: it serves HTTP and gRPC and owns one `RouterService`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import gc
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from quire.cluster.api_common.watchers import Watchers
from quire.cluster.auth.access_control import AccessControl
from quire.cluster.auth.key_ring import KeyRing
from quire.cluster.auth.request_bill import Ledger
from quire.cluster.auth.tenant_counters import TenantCounters
from quire.cluster.auth.usage_log import UsageLog
from quire.cluster.config.app_config import AppConfig
from quire.cluster.config.auth_section import AuthArgs
from quire.cluster.config.http_section import TracingArgs
from quire.cluster.config.live_update import router_section
from quire.cluster.config.router_section import RouterArgs
from quire.cluster.grpc.grpc_api import GrpcApi
from quire.cluster.grpc.grpc_poller import batch_pollers
from quire.cluster.proxies.ray_proxies import open_ports, open_reflection
from quire.cluster.scrape import Answers, Scrape
from quire.cluster.tls.tls_listeners import TlsListeners
from quire.protos.adapter_ref import AdapterRef
from quire.protos.errors import Unavailable
from quire.protos.metric_families import Page
from quire.replica.checkpoint.checkpoint import resolve_checkpoint
from quire.replica.checkpoint.model_spec import CheckpointError
from quire.replica.serving.final_errors import final_errors
from quire.replica.serving.node_checkpoints import bring_checkpoint
from quire.replica.serving.ray_metrics import RayMetrics
from quire.router.adapters.adapter_control import AdapterControl
from quire.router.adapters.adapter_registry import PlainEntry
from quire.router.admission.failover_budget import FailoverBudget
from quire.router.admission.wait_bounds import AdmissionLimits
from quire.router.explain.decision_log import DecisionLog
from quire.router.fleet.replicas import ReplicaTable
from quire.router.index.prefix_index import PrefixIndex
from quire.router.policy.by_name import make_policy
from quire.router.request.context import ModelFacts
from quire.router.request.params import GenerationDefaults, Limits
from quire.router.request.router_metrics import RouterMetrics
from quire.router.request.service import RouterService
from quire.router.scoring.embedding_format import EmbeddingFormat
from quire.router.status_types import LiveState
from quire.router.text.chat_template import ChatTemplate
from quire.router.text.tokenizer import AsyncTokenizer, TextTokenizer
from quire.router.trace.tracer import Tracer
from quire.router.transport.bus import Bus
from quire.router.transport.peers import Peers
from quire.router.transport.replica_adapters import ReplicaAdapters

logger = logging.getLogger("ray.serve")

# A new router keeps its ports closed until a replica is attached, for at most this time. After it, either no replica is
# running or all are still loading, and the router answers with that error.
FIRST_ATTACH_TIMEOUT_S = 10.0
# A router that missed a change of the adapters learns it within this time.
EXCHANGE_PERIOD_S = 15.0


def this_service() -> RouterService:
    """The service of the Serve replica that runs this code."""
    return serve.get_replica_context().servable_object.service


def this_access() -> AccessControl:
    """The keys of the Serve replica that runs this code; only if the application has the section `auth`."""
    return serve.get_replica_context().servable_object.access


def this_watchers() -> Watchers:
    """What counts the streams that only watch, of the Serve replica that runs this code."""
    return serve.get_replica_context().servable_object.watchers


def _find_checkpoint(app: AppConfig) -> Path:
    bring_checkpoint(app.model, app.revision, weights=False)
    return resolve_checkpoint(app.model, app.revision, weights=False)


class Router(GrpcApi):
    """One router: `serve.ingress` adds the HTTP API and `GrpcApi` adds the gRPC methods.

    Parameters
    ----------
    replicas
        Handle of the engine deployment.
    config
        `AppConfig` as plain data.
    """

    service: RouterService

    # Ray awaits a coroutine `__init__` of an actor.
    async def __init__(  # type: ignore[misc]
        self, replicas: DeploymentHandle, config: dict[str, Any]
    ):
        app = AppConfig.from_args(config)
        with final_errors("router"):
            # In a thread, because the download of a Hugging Face model can take minutes.
            checkpoint = await asyncio.to_thread(_find_checkpoint, app)
        # Serve starts its HTTP and gRPC servers in this actor task, so direct requests run in it. Each request that a
        # proxy forwards is a task of its own (`is_direct_call`).
        self._start_task = ray.get_runtime_context().get_task_id()
        context = serve.get_replica_context()
        self._listeners: TlsListeners | None = None
        if app.tls is not None:
            self._listeners = TlsListeners(app.tls, context.app_name)
            with final_errors("router"):
                await self._listeners.start()
        router_id = f"router-{context.replica_tag}"  # the name in the Ray dashboard
        table = ReplicaTable(PrefixIndex(), lost_after_s=app.router.stream_idle_timeout_s)
        table.prefill_pool.share = app.router.pool_share
        self._args = app.router
        self._defaults = GenerationDefaults.load(checkpoint)
        self._table = table
        self._bus = Bus(
            replicas,
            app.model_name,
            router_id,
            table,
            drain_timeout_s=app.router.drain_timeout_s,
            credit_tokens=app.router.stream_credit_tokens,
            slow_client_timeout_s=app.router.slow_client_timeout_s,
        )
        peers = Peers(serve.get_deployment_handle(context.deployment, context.app_name))
        self._metrics = RouterMetrics()
        labels = {"application": context.app_name, "model_name": app.model_name}
        self._labels = {**labels, "deployment": context.deployment, "router": router_id}
        self._vllm_names = app.metrics.vllm_names
        scrape = self._scrape(labels, replicas.deployment_name, peers)
        adapters = AdapterControl(
            app.model_name,
            ReplicaAdapters(self._bus),
            peers.exchange_adapters,
            None if app.adapter_folder is None else Path(app.adapter_folder),
        )
        with final_errors("router"):
            await asyncio.to_thread(_declare, adapters, app)
        with final_errors("router"):
            tracer = None if app.tracing is None else _tracer(app.tracing, router_id)
        self.service = _service(
            app,
            checkpoint,
            router_id,
            table,
            self._bus,
            peers,
            self._metrics,
            scrape,
            adapters,
            tracer,
        )
        self._metrics.follow(self.service)
        if app.auth is not None:
            with final_errors("router"):
                self.access = _access(app.auth, router_id, table)
        self._ray_metrics = RayMetrics(self._metrics.metrics)
        self.watchers = Watchers(app.router.max_watchers, app.router.max_watchers_per_client)
        self._bus.queued_prefill_s = self.service.gate.queued_prefill_s
        # Loaded objects stay alive: exclude Ray and the tokenizer from collections, which would delay streams.
        gc.collect()
        gc.freeze()
        # Collect again: CPython starts a full collection only after new objects exceed 25% of the last survivors.
        gc.collect()
        batch_pollers()
        if warning := open_ports():
            logger.warning("%s", warning)
        if app.auth is not None and (problem := await open_reflection()):
            logger.error("%s", problem)
        self._bus.start()
        self.service.regret.start()
        # Serve opens the ports when this method returns, so the first requests find a replica.
        if not await self._bus.first_attached(FIRST_ATTACH_TIMEOUT_S):
            logger.info(
                "no replica has loaded its model within %g s; requests get status 503 until one has",
                FIRST_ATTACH_TIMEOUT_S,
            )
        # After the ports open, so that it delays no request's first replica.
        self._loading = asyncio.create_task(self.service.load_parser())
        self._exchanging = asyncio.create_task(_exchange_adapters(adapters))

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Change options of the running router; Serve calls this with the deployment's `user_config`.

        This is a coroutine, because Serve would call a plain function in a thread while requests read the options.
        """
        limits = router_section(self._args, user_config)
        self._table.lost_after_s = limits.stream_idle_timeout_s
        self._table.prefill_pool.share = limits.pool_share
        self._bus.credit_tokens = limits.stream_credit_tokens
        self._bus.slow_client_timeout_s = limits.slow_client_timeout_s
        self.watchers.most = limits.max_watchers
        self.watchers.most_of_client = limits.max_watchers_per_client
        self.service.reconfigure(
            _facts(self.service.facts, limits, self._defaults),
            make_policy(limits.policy),
            max_move_s=limits.max_move_s,
            max_migrations=limits.max_migrations,
            ready_timeout_s=limits.ready_timeout_s,
            admission=_admission(limits),
            max_explained_decisions=limits.max_explained_decisions,
        )
        if self.service.decision_log is not None:
            self.service.decision_log.resize(limits.decision_log_bytes)

    def is_direct_call(self) -> bool:
        return ray.get_runtime_context().get_task_id() == self._start_task

    async def own_decisions(
        self, request_id: str | None, limit: int, payer: str | None = None
    ) -> tuple[str, list[dict[str, Any]]]:
        """Return this router's id and its recent decisions; the other routers call this through `Peers`."""
        return self.service.router_id, self.service.ring.recent(request_id, limit, payer)

    async def own_state(self, payer: str | None) -> LiveState:
        """Return what this router knows; the other routers call this through `Peers`."""
        return self.service.own_state(payer)

    async def own_adapters(self, entries: list[PlainEntry]) -> list[PlainEntry]:
        """Take over another router's adapters and return this router's; the others call this through `Peers`."""
        registry = self.service.adapter_control.registry
        registry.merge(entries)
        return registry.plain()

    async def own_metrics(self) -> tuple[str, Page]:
        """Return this router's id and its metrics; the other routers call this through `Peers`."""
        return self._own_metrics()

    def _scrape(self, labels: dict[str, str], replicas: str, peers: Peers) -> Scrape:
        """Make the object that gathers the application's metrics, all with `labels`.

        `replicas` is the name of the engine's deployment.
        """
        of_replicas = {**labels, "deployment": replicas}
        sources: dict[str, Callable[[float], Awaitable[Answers]]] = {
            self._labels["deployment"]: peers.metrics,
            replicas: functools.partial(self._bus.metrics_pages, of_replicas, self._vllm_names),
        }
        return Scrape(labels, self._own_metrics, sources, vllm_names=self._vllm_names)

    def _own_metrics(self) -> tuple[str, Page]:
        page = self._metrics.page(self._labels, vllm_names=self._vllm_names)
        if self.access is not None:
            page |= self.access.metrics_page(self._labels)
        return self.service.router_id, page

    async def __del__(self) -> None:
        listeners = getattr(self, "_listeners", None)
        if listeners is not None:
            await listeners.close()
        bus = getattr(self, "_bus", None)
        if bus is not None:
            await bus.close()
        service = getattr(self, "service", None)
        if service is not None:
            await asyncio.to_thread(service.regret.close)
            if service.decision_log is not None:
                await asyncio.to_thread(service.decision_log.close)
            if service.tracer is not None:
                await asyncio.to_thread(service.tracer.sink.close)
        if self.access is not None:
            await asyncio.to_thread(self.access.close)


def _declare(adapters: AdapterControl, app: AppConfig) -> None:
    """Add the adapters of the configuration."""
    try:
        adapters.declare([AdapterRef.of_folder(a.name, a.path) for a in app.adapters])
    except OSError as error:
        raise CheckpointError(f"adapters: {error}") from error


async def _exchange_adapters(adapters: AdapterControl) -> None:
    """Exchange adapters with the other routers: at the start, and for those that missed a change."""
    while True:
        with contextlib.suppress(Unavailable):
            await adapters.exchange()
        await asyncio.sleep(EXCHANGE_PERIOD_S)


def _access(auth: AuthArgs, router_id: str, table: ReplicaTable) -> AccessControl:
    """Read the keys and start to watch their file; raises `KeyFileError` if it cannot be used."""
    ring = KeyRing(Path(auth.key_file), max_labels=auth.max_tenant_labels)
    log = None
    if auth.usage_log_folder is not None:
        log = UsageLog(
            Path(auth.usage_log_folder),
            router_id,
            max_bytes=auth.usage_log_bytes,
            num_files=auth.usage_log_files,
        )
    ring.start()
    return AccessControl(
        ring, Ledger(counters=TenantCounters(), log=log, num_routers=table.num_routers)
    )


def _tracer(tracing: TracingArgs, router_id: str) -> Tracer:
    """Start the export of traces; raises a `ValueError` without the extra that it needs."""
    try:
        # Without the section, none of OpenTelemetry's exporters is loaded.
        from quire.cluster.tracing.collector import trace_queue
    except ImportError as error:
        raise ValueError(
            f"the section tracing needs the extra otel: pip install 'quire[otel]' ({error})"
        ) from None
    return Tracer(router_id, tracing.sample_ratio, trace_queue(tracing, router_id))


def _service(
    app: AppConfig,
    checkpoint: Path,
    router_id: str,
    table: ReplicaTable,
    bus: Bus,
    peers: Peers,
    observer: RouterMetrics,
    scrape: Scrape,
    adapters: AdapterControl,
    tracer: Tracer | None,
) -> RouterService:
    limits = app.router
    defaults = GenerationDefaults.load(checkpoint)
    facts = ModelFacts(
        name=app.model_name,
        created_s=int(time.time()),
        defaults=defaults,
        limits=Limits(),
        chat_template_kwargs=app.chat_template_kwargs,
        embedding=EmbeddingFormat.load(checkpoint),
    )
    return RouterService(
        _facts(facts, limits, defaults),
        router_id=router_id,
        tokenizer=AsyncTokenizer(
            TextTokenizer.load(checkpoint),
            num_threads=limits.tokenizer_threads,
            cache_bytes=limits.tokenizer_cache_bytes,
        ),
        template=ChatTemplate.load(checkpoint, app.chat_template),
        table=table,
        policy=make_policy(limits.policy),
        transport=bus,
        observer=observer,
        max_move_s=limits.max_move_s,
        max_migrations=limits.max_migrations,
        budget=FailoverBudget(limits.migration_refill_s, limits.migration_burst),
        retain_s=app.session.retain_s,
        max_explained_decisions=limits.max_explained_decisions,
        decision_log=_decision_log(limits, router_id),
        peers=peers,
        scrape=scrape.text,
        adapter_control=adapters,
        tracer=tracer,
        ready_timeout_s=limits.ready_timeout_s,
        admission=_admission(limits),
    )


def _admission(limits: RouterArgs) -> AdmissionLimits:
    return AdmissionLimits(
        max_wait_s=limits.max_wait_s,
        max_queued_requests=limits.max_queued_requests,
        max_queued_tokens=limits.max_queued_tokens,
        dispatch_window_s=limits.dispatch_window_s,
        max_replica_waiting_requests=limits.max_replica_waiting_requests,
        quantum_tokens=limits.fairness_quantum_tokens,
    )


def _facts(facts: ModelFacts, limits: RouterArgs, defaults: GenerationDefaults) -> ModelFacts:
    """Return `facts` with the limits and defaults of these router options."""
    return dataclasses.replace(
        facts,
        defaults=dataclasses.replace(defaults, max_tokens=limits.max_tokens_default),
        limits=Limits(
            max_stop_strings=limits.max_stop_strings, max_stop_string_bytes=limits.max_stop_bytes
        ),
        max_prompt_tokens=limits.max_prompt_tokens,
        special_tokens_in_messages=limits.special_tokens_in_messages,
    )


def _decision_log(limits: RouterArgs, router_id: str) -> DecisionLog | None:
    if limits.decision_log_folder is None:
        return None
    folder = Path(limits.decision_log_folder)
    return DecisionLog(folder, router_id, limits.decision_log_bytes)
