"""Rules of KubeRay 1.7 that no schema expresses.

From ray-operator/controllers/ray/utils/validation.go and common/service.go. Rules for what KubeRay would accept, but
ignore or never finish, are here too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from .manifests import groups, pod, ray_container

Doc = dict[str, Any]


def operator(doc: Doc) -> Iterator[str]:
    """Rules for which KubeRay refuses a RayService, or ignores part of it."""
    spec, cluster = doc["spec"], doc["spec"]["rayClusterConfig"]
    name = doc["metadata"]["name"]
    if len(name) > 47 or not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        yield f"metadata.name: must be a DNS-1035 label of at most 47 characters, got {name!r}"
    if cluster["headGroupSpec"].get("headService", {}).get("metadata", {}).get("name") is not None:
        yield "headGroupSpec.headService.metadata.name: must not be set"
    yield from _operator_upgrade(spec)
    if spec.get("rayClusterDeletionDelaySeconds", 60) < 0:
        yield "rayClusterDeletionDelaySeconds: must not be negative"
    for gated in {"networkPolicy", "tlsOptions", "historyServerOptions"} & cluster.keys():
        yield f"rayClusterConfig.{gated}: needs a feature gate"
    yield from _operator_auth(cluster)
    yield from _operator_store(cluster)
    yield from _operator_autoscaler(cluster)
    for group in groups(doc):
        yield from _operator_group(group)
    for group in cluster["workerGroupSpecs"]:
        yield from _operator_workers(group, bool(cluster.get("enableInTreeAutoscaling")))
    head_env = {item["name"] for item in ray_container(cluster["headGroupSpec"]).get("env", ())}
    for variable in {"RAY_REDIS_ADDRESS", "REDIS_USERNAME", "RAY_enable_autoscaler_v2"} & head_env:
        yield f"head env {variable}: must be set through the RayCluster's own fields"
    port_names = {port.get("name", "") for port in ray_container(cluster["headGroupSpec"])["ports"]}
    for needed in {"gcs-server", "dashboard", "metrics", "serve", "serve-grpc"} - port_names:
        yield f"head ports: the Services take their ports from here and {needed!r} is missing"


def _operator_upgrade(spec: Doc) -> Iterator[str]:
    strategy = spec.get("upgradeStrategy", {})
    kind = strategy.get("type", "NewCluster")
    if kind not in {"NewCluster", "NewClusterWithIncrementalUpgrade", "None"}:
        yield f"upgradeStrategy.type: unknown, got {kind!r}"
    if kind != "NewClusterWithIncrementalUpgrade":
        return
    if not spec["rayClusterConfig"].get("enableInTreeAutoscaling"):
        yield "upgradeStrategy: an incremental upgrade needs enableInTreeAutoscaling"
    options = strategy.get("clusterUpgradeOptions", {})
    step, surge = options.get("stepSizePercent", 0), options.get("maxSurgePercent", 100)
    # KubeRay takes a step of 0 too, with which an upgrade never ends.
    if not 0 < step <= surge <= 100:
        yield f"clusterUpgradeOptions: must have 0 < step <= surge <= 100, got {step} and {surge}"
    if options.get("intervalSeconds", 0) <= 0:
        yield "clusterUpgradeOptions.intervalSeconds: must be above 0"
    if not options.get("gatewayClassName"):
        yield "clusterUpgradeOptions.gatewayClassName: missing"
    if "serveService" in spec:
        yield "serveService: KubeRay ignores it for an incremental upgrade"


def _operator_store(cluster: Doc) -> Iterator[str]:
    options = cluster.get("gcsFaultToleranceOptions")
    if options is None:
        return
    if options.get("backend") != "rocksdb":
        yield "gcsFaultToleranceOptions.backend: must be rocksdb; there is no Redis here"
    if redis := sorted(key for key in options if key.startswith(("redis", "external"))):
        yield f"gcsFaultToleranceOptions: {redis} are not for rocksdb"
    storage = options.get("storage", {})
    # One claim for the two clusters of an upgrade would have two writers.
    if "claimName" in storage or storage.get("accessModes") != ["ReadWriteOnce"]:
        yield f"gcsFaultToleranceOptions.storage: must be a ReadWriteOnce claim of KubeRay's, got {storage}"
    if tuple(map(int, cluster["rayVersion"].split(".")[:2])) < (2, 57):
        yield "rayVersion: the rocksdb store needs 2.57"
    head = ray_container(cluster["headGroupSpec"])
    if any(m["mountPath"] == "/data/gcs" for m in head.get("volumeMounts", ())):
        yield "head mount /data/gcs: KubeRay's own"
    for item in head.get("env", ()):
        if item["name"] in {"RAY_gcs_storage", "RAY_gcs_storage_path"}:
            yield f"head env {item['name']}: KubeRay's own"


def _operator_autoscaler(cluster: Doc) -> Iterator[str]:
    options = cluster.get("autoscalerOptions")
    if not cluster.get("enableInTreeAutoscaling"):
        if options is not None:
            yield "autoscalerOptions: without enableInTreeAutoscaling they do nothing"
        return
    if (options or {}).get("version") != "v2":
        yield "autoscalerOptions.version: must be v2"
        return
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        if pod(group).get("restartPolicy", "Never") != "Never":
            yield "restartPolicy: must be Never or unset with the autoscaler v2"
    if options.get("idleTimeoutSeconds", 60) < 300:
        yield "autoscalerOptions.idleTimeoutSeconds: must be at least 300, a model takes minutes to load"


def _operator_auth(cluster: Doc) -> Iterator[str]:
    options = cluster.get("authOptions", {})
    if options.get("mode") != "token":
        yield f"authOptions.mode: must be 'token', got {options.get('mode')!r}"
    if options.get("enableK8sTokenAuth"):
        yield "authOptions.enableK8sTokenAuth: not supported for a RayService"
    version = cluster.get("rayVersion", "0.0")
    if tuple(map(int, version.split(".")[:2])) < (2, 52):
        yield f"rayVersion: token authentication needs 2.52, got {version!r}"


def _operator_group(group: Doc) -> Iterator[str]:
    name = group.get("groupName", "head")
    start = group.get("rayStartParams", {})
    if group.get("resources") and start.keys() & {"num-cpus", "num-gpus", "memory", "resources"}:
        yield f"{name}: resources are given both in rayStartParams and in resources"
    if "labels" in start:
        yield f"{name}: rayStartParams.labels is not supported, use labels"
    for key, value in start.items():
        if not isinstance(value, str):
            yield f"{name}: rayStartParams.{key} must be a string, got {value!r}"


def _operator_workers(group: Doc, autoscaling: bool) -> Iterator[str]:
    name, low, high = group["groupName"], group.get("minReplicas"), group.get("maxReplicas")
    if not autoscaling and (low is None or high is None):
        yield f"{name}: minReplicas and maxReplicas must both be set without autoscaling"
    elif low is not None and high is not None and not 0 <= low <= high:
        yield f"{name}: must have 0 <= minReplicas <= maxReplicas, got {low} and {high}"
    if group.get("suspend"):
        yield f"{name}: suspend needs a feature gate"
