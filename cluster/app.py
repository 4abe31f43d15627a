"""The Serve application: `import_path: quire.cluster.app:build`.

```
 Router  (ingress: HTTP and gRPC, CPU)  × routers
    │  handle, ranked by quire.router.transport.serve_router.DecidedRouter
    ▼
 Replica (engine: one GPU, or the CPU)  × replicas
```
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.context import _get_global_client

from quire.cluster.config.app_config import AppConfig
from quire.cluster.config.resources import device_of, lacking, num_gpus, reservations, reserved
from quire.cluster.config.scaling_sections import ReplicaResources, RouterResources
from quire.cluster.http.adapters_api import adapters_routes
from quire.cluster.http.decisions_api import decisions_routes
from quire.cluster.http.embeddings_api import embeddings_routes
from quire.cluster.http.http_api import build_app
from quire.cluster.http.messages_api import messages_routes
from quire.cluster.http.responses_api import responses_routes
from quire.cluster.ingress import Router, this_access, this_service, this_watchers
from quire.cluster.page import page_routes
from quire.cluster.proxies.ray_proxies import LOOPBACK, runs_haproxy
from quire.cluster.proxies.ray_settings import deployment_variables
from quire.replica.config import Device, EngineArgs
from quire.replica.serving.actor import Replica
from quire.replica.serving.final_errors import CannotStart

logger = logging.getLogger("ray.serve")

# In addition to completions and chats.
APIS = (
    messages_routes.add_routes,
    responses_routes.add_routes,
    decisions_routes.add_routes,
    embeddings_routes.add_routes,
    page_routes.add_routes,
    adapters_routes.add_routes,
)
HEALTH_CHECK_PERIOD_S = 2.0
HEALTH_CHECK_TIMEOUT_S = 10.0
MOVE_TIME_S = 40.0
# A stopping ingress replica stays reachable for 30 s by Serve's default
# (RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S). This time counts towards the timeout after which Serve kills it, and
# the replica also needs time to shut down.
REACHABLE_S, END_S = 30.0, 5.0
DRAIN_POLL_S = 0.5  # interval at which a draining replica checks whether it is idle
# Calls in addition to requests: attach streams, aborts and resyncs of each router.
CONTROL_CALLS_PER_ROUTER = 64


def build(args: dict[str, Any]) -> Application:
    """Build the application from the `args` of the Serve config.

    Raises
    ------
    ConfigError
        Lists every problem of `args`.
    """
    config = AppConfig.from_args(args)
    return application(config, _replica_class(config))


def application(config: AppConfig, replica_class: type[Replica]) -> Application:
    """Build the application with replicas of class `replica_class`; benchmarks pass a class of their own."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    device = device_of(config, nodes)
    _check_resources(config, device, nodes)
    max_calls = (
        config.engine.max_running_requests
        + config.engine.max_waiting_requests
        + CONTROL_CALLS_PER_ROUTER * config.routers
    )
    replica = serve.deployment(
        replica_class,
        name="Replica",
        **_num_replicas(config),
        max_ongoing_requests=max_calls,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        # After `drain_timeout_s` routers migrate the remaining streams; `MOVE_TIME_S` is the time for this.
        graceful_shutdown_timeout_s=config.router.drain_timeout_s + MOVE_TIME_S,
        graceful_shutdown_wait_loop_s=DRAIN_POLL_S,
        user_config={},  # options to change at run time (`live_update`); none at the start
        ray_actor_options=_actor_options(config.replica_resources, num_gpus(config, device)),
        **_rank_bundles(config, device),
        request_router_config=RequestRouterConfig(
            request_router_class="quire.router.transport.serve_router:DecidedRouter",
            request_router_kwargs={"channel": config.model_name},
        ),
    ).bind(dataclasses.asdict(_engine_args(config, device)), config.engine.heartbeat_ms)

    max_body_bytes, http = config.router.max_body_bytes, config.http
    allowed_hosts = _allowed_hosts(config)
    get_access = None if config.auth is None else this_access

    def http_app() -> Any:
        return build_app(
            this_service,
            max_body_bytes=max_body_bytes,
            keepalive_s=http.keepalive_s,
            cors_origins=http.cors_origins,
            allowed_hosts=allowed_hosts,
            apis=APIS,
            get_access=get_access,
            get_watchers=this_watchers,
        )

    router = serve.deployment(
        serve.ingress(http_app)(Router),
        name="Router",
        num_replicas=config.routers,
        # All requests that the router may have sent and all that may wait in its queue. Further requests reach the
        # router, which refuses them with an error, instead of waiting in Serve's queue.
        max_ongoing_requests=config.max_replicas * max_calls + config.router.max_queued_requests,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        # An old HAProxy worker may send requests during this time; their streams get the full drain time too.
        graceful_shutdown_timeout_s=REACHABLE_S + config.router.drain_timeout_s + END_S,
        graceful_shutdown_wait_loop_s=DRAIN_POLL_S,
        user_config={},
        ray_actor_options=_actor_options(config.router_resources),
    )
    return router.bind(replica, config.model_dump())


def _allowed_hosts(config: AppConfig) -> list[str]:
    """Return the host names that requests may give: by default only this machine's if nothing else can connect."""
    if config.http.allowed_hosts is not None:
        return config.http.allowed_hosts
    return [] if _get_global_client().http_config.host in LOOPBACK else ["*"]


def _replica_class(config: AppConfig) -> type[Replica]:
    if not config.engine.fault_injection:
        return Replica
    from quire.replica.serving.faults.faulty_actor import (
        FaultyReplica,  # not loaded in production
    )

    return FaultyReplica


def _num_replicas(config: AppConfig) -> dict[str, Any]:
    """Deployment options for a constant number of replicas or for autoscaling."""
    scaling = config.autoscaling
    if scaling is None:
        return {"num_replicas": config.replicas}
    policy = AutoscalingPolicy(
        policy_function="quire.cluster.autoscaling:ScaleOnEngineLoad",
        policy_kwargs={
            "target_queued_prefill_s": scaling.target_queued_prefill_s,
            "target_kv_in_use": scaling.target_kv_in_use,
            "target_requests": scaling.target_requests,
        },
    )
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=scaling.min_replicas,
            initial_replicas=config.replicas,
            max_replicas=scaling.max_replicas,
            upscale_delay_s=scaling.upscale_delay_s,
            downscale_delay_s=scaling.downscale_delay_s,
            look_back_period_s=scaling.look_back_s,
            metrics_interval_s=scaling.report_interval_s,
            policy=policy,
        )
    }


def _check_resources(config: AppConfig, device: str, nodes: list[dict[str, float]]) -> None:
    """Refuse an application if this Ray cluster can never place it; warn if the cluster cannot place it yet.

    Raises
    ------
    CannotStart
        Resources are missing and the node has a loopback address, so no other node can join.
    """
    lack = lacking(reservations(config, device), nodes)
    if lack is None:
        return
    if ray.util.get_node_ip_address() in LOOPBACK:
        raise CannotStart(
            f"{lack}; no other machine can join this Ray. Change replicas, device, replica_resources or "
            "router_resources"
        )
    logger.warning(
        "%s: Serve waits until Ray's autoscaler or `ray start` on another machine adds it", lack
    )


def _actor_options(
    resources: ReplicaResources | RouterResources, gpus: float = 0
) -> dict[str, Any]:
    given = (ray.get_runtime_context().runtime_env or {}).get("env_vars", {})
    each = reserved(resources, gpus)
    options: dict[str, Any] = {
        "num_cpus": each["CPU"],
        "num_gpus": each["GPU"],
        "runtime_env": {"env_vars": deployment_variables(given, runs_haproxy())},
    }
    if each["memory"]:
        options["memory"] = each["memory"]
    return options


def _rank_bundles(config: AppConfig, device: str) -> dict[str, Any]:
    """Deployment options for the ranks of a replica: one placement group with equal bundles on one node."""
    if config.engine.tensor_parallel == 1:
        return {}
    each = reserved(config.replica_resources, num_gpus(config, device))
    # Ray has no bundles without resources.
    bundle = {name: amount for name, amount in each.items() if amount} or {"CPU": 0.001}
    return {
        "placement_group_bundles": [bundle] * config.engine.tensor_parallel,
        "placement_group_strategy": "STRICT_PACK",
    }


def _engine_args(config: AppConfig, device: Device) -> EngineArgs:
    limits = config.engine.engine_options()
    if limits["num_threads"] is None and device == "cpu":
        # Divide the cluster's cores among the replicas: by default each replica would start one thread per core.
        cores = ray.cluster_resources().get("CPU", 1)
        num_processes = config.max_replicas * config.engine.tensor_parallel
        limits["num_threads"] = max(1, int(cores) // num_processes)
    return EngineArgs(
        model=config.model,
        revision=config.revision,
        device=device,
        dtype=config.dtype,
        session_max_share=config.session.max_share,
        **limits,
    )
