"""What the manifests must satisfy. Each check yields one sentence for each thing wrong.

`schema`: the CRDs and the core API. `serve`: the text inside. `operator`: rules of KubeRay 1.7 that
no schema expresses, from ray-operator/controllers/ray/utils/validation.go and common/service.go.
`safety`, `traffic` and `sizing`: Quire's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate

from quire.cluster.config import serve_config
from quire.cluster.config.app_config import AppConfig
from quire.cluster.config.config_problems import ConfigError

from .manifests import (
    K8S,
    dockerfile,
    dockerfile_args,
    flatten,
    groups,
    pod,
    quantity,
    ray_container,
)

Doc = dict[str, Any]

RAYLET_PORT = 52365  # Ray's dashboard agent: /api/healthz
STARTUP_S = 600  # as long as KubeRay's own liveness probe waits (120 x 5 s)
ENDPOINTS_S = 15  # until every node has taken a terminating pod out of a Service
MARGIN_S = 10
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|_KEY$")


def _validators() -> dict[tuple[str, str], jsonschema.Draft202012Validator]:
    found = {}
    for path in (Path(__file__).parent / "schemas").glob("*.schema.json"):
        schema = json.loads(path.read_text(encoding="utf-8"))
        key = tuple(schema["properties"][name]["const"] for name in ("apiVersion", "kind"))
        found[key] = jsonschema.Draft202012Validator(schema)
    return found


def schema(doc: Doc) -> Iterator[str]:
    """CRDs by the schemas beside this file, everything else by kubernetes-validate, both strict."""
    validator = _validators().get((doc.get("apiVersion"), doc.get("kind")))
    if validator is not None:
        for error in validator.iter_errors(doc):
            yield f"{'.'.join(map(str, error.absolute_path))}: {error.message}"
        return
    try:
        kubernetes_validate.validate(doc, kubernetes_validate.latest_version(), strict=True)
    except kubernetes_validate.SchemaNotFoundError:
        yield f"no schema for {doc.get('apiVersion')} {doc.get('kind')}"
    except kubernetes_validate.ValidationError as error:
        yield f"{'.'.join(map(str, error.path))}: {error.message}"


def serve(doc: Doc) -> Iterator[str]:
    """serveConfigV2 by the loader of `quire config check`: Ray's schema and no unknown key."""
    try:
        serve_config.check(serve_config.parse_yaml(doc["spec"]["serveConfigV2"]))
    except ConfigError as error:
        yield from map(str, error.problems)


def _app(doc: Doc) -> AppConfig:
    config = serve_config.check(serve_config.parse_yaml(doc["spec"]["serveConfigV2"]))
    (application,) = config.applications
    assert application.config is not None, f"{application.import_path} is not Quire's"
    return application.config


# --------------------------------------------------------------------------------------------------
# KubeRay
# --------------------------------------------------------------------------------------------------


def operator(doc: Doc) -> Iterator[str]:
    """Rules for which KubeRay refuses a RayService, or ignores part of it."""
    spec, cluster = doc["spec"], doc["spec"]["rayClusterConfig"]
    name = doc["metadata"]["name"]
    if len(name) > 47 or not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        yield f"metadata.name: must be a DNS-1035 label of at most 47 characters, got {name!r}"
    if cluster["headGroupSpec"].get("headService", {}).get("metadata", {}).get("name") is not None:
        yield "headGroupSpec.headService.metadata.name: must not be set"
    strategy = spec.get("upgradeStrategy", {}).get("type", "NewCluster")
    if strategy not in {"NewCluster", "None"}:  # the incremental one routes no gRPC (kuberay#5018)
        yield f"upgradeStrategy.type: must be NewCluster or None, got {strategy!r}"
    if spec.get("rayClusterDeletionDelaySeconds", 60) < 0:
        yield "rayClusterDeletionDelaySeconds: must not be negative"
    for gated in {"networkPolicy", "tlsOptions", "gcsFaultToleranceOptions"} & cluster.keys():
        yield f"rayClusterConfig.{gated}: needs a feature gate or a store"
    yield from _operator_auth(cluster)
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


# --------------------------------------------------------------------------------------------------
# Safety
# --------------------------------------------------------------------------------------------------


def safety(doc: Doc) -> Iterator[str]:
    """Images, privileges, secrets, writable places."""
    images = {c["image"] for group in groups(doc) for c in pod(group)["containers"]}
    if len(images) != 1:
        yield f"image: head and workers must run the same one, got {sorted(images)}"
    for image in images:
        tag = image.rpartition("/")[2].partition(":")[2]
        if not tag or tag.partition("@")[0] == "latest":
            yield f"image: must have a tag other than latest, got {image!r}"
    for path, value in flatten(doc).items():
        if re.search(r"hostPath|hostNetwork|hostPID|hostIPC|privileged$", path) and value:
            yield f"{path}: must not be set, got {value!r}"
    for group in groups(doc):
        name = group.get("groupName", "head")
        yield from (f"{name}: {problem}" for problem in _privileges(pod(group)))
        yield from (f"{name}: {problem}" for problem in _secrets(ray_container(group)))
        yield from (f"{name}: {problem}" for problem in _writable(pod(group)))


def _privileges(spec: Doc) -> Iterator[str]:
    context = spec.get("securityContext", {})
    wanted = {"runAsNonRoot": True, "runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000}
    for key, value in wanted.items():
        if context.get(key) != value:
            yield f"securityContext.{key}: must be {value}, got {context.get(key)}"
    if context.get("seccompProfile") != {"type": "RuntimeDefault"}:
        yield f"seccompProfile: must be RuntimeDefault, got {context.get('seccompProfile')}"
    if spec.get("automountServiceAccountToken") is not False:
        yield "automountServiceAccountToken: must be false; no container calls the API server"
    for container in spec["containers"]:
        own = container.get("securityContext", {})
        if own.get("allowPrivilegeEscalation") is not False:
            yield f"{container['name']}: allowPrivilegeEscalation must be false"
        if own.get("readOnlyRootFilesystem") is not True:
            yield f"{container['name']}: readOnlyRootFilesystem must be true"
        if own.get("capabilities") != {"drop": ["ALL"]}:
            yield f"{container['name']}: must drop ALL capabilities and add none"


def _secrets(container: Doc) -> Iterator[str]:
    for item in container.get("env", ()):
        reference = item.get("valueFrom", {}).get("secretKeyRef")
        if _SECRET_NAME.search(item["name"]) and reference is None:
            yield f"env {item['name']}: must come from a secretKeyRef"


def _writable(spec: Doc) -> Iterator[str]:
    volumes = {volume["name"] for volume in spec.get("volumes", ())}
    container = spec["containers"][0]
    mounts = {m["mountPath"]: m for m in container.get("volumeMounts", ())}
    env = {item["name"]: item.get("value") for item in container.get("env", ())}
    for mount in mounts.values():
        if mount["name"] not in volumes:
            yield f"mount {mount['mountPath']}: no volume is called {mount['name']!r}"
    needed = {"/tmp/ray", "/tmp/haproxy-serve", "/dev/shm", env.get("HOME"), env.get("HF_HOME")}
    for path in needed:
        above = [place for place in mounts if f"{path}/".startswith(f"{place}/")]
        if path is None or not above or mounts[max(above, key=len)].get("readOnly"):
            yield f"{path}: must lie in a writable volume, since the image is read-only"


# --------------------------------------------------------------------------------------------------
# Traffic: ports, probes, the end of a pod
# --------------------------------------------------------------------------------------------------


def traffic(doc: Doc) -> Iterator[str]:
    """Clients reach routers, only while these answer, and open streams get time to end."""
    config = serve_config.parse_yaml(doc["spec"]["serveConfigV2"])
    http, grpc = config["http_options"], config["grpc_options"]
    if http["host"] != "0.0.0.0":
        yield f"http_options.host: must be 0.0.0.0 in a pod, got {http['host']!r}"
    if doc["spec"].get("excludeHeadPodFromServeSvc") is not True:
        yield "excludeHeadPodFromServeSvc: must be true, the head is ready without any router"
    wanted = {"serve": http["port"], "serve-grpc": grpc["port"], "metrics": 8080}
    for group in groups(doc):
        name, container = group.get("groupName", "head"), ray_container(group)
        ports = {p.get("name"): p["containerPort"] for p in container.get("ports", ())}
        for port_name in wanted.keys() | ports.keys():
            number = ports.get(port_name)
            if port_name in wanted and number != wanted[port_name]:
                yield f"{name}: port {port_name} must be {wanted[port_name]}, got {number}"
            if len(port_name or "") > 15:
                yield f"{name}: port name {port_name!r} must have at most 15 characters"
        yield from (f"{name}: {problem}" for problem in _probes(container, http["port"], group))
    delay_s = doc["spec"].get("rayClusterDeletionDelaySeconds", 60)
    longest_s = max(http.get("request_timeout_s") or 600, _app(doc).router.drain_timeout_s)
    if delay_s < longest_s:
        yield f"rayClusterDeletionDelaySeconds: must be at least {longest_s}, got {delay_s}"
    for group in groups(doc)[1:]:
        yield from _end_of_pod(group, _app(doc).router.drain_timeout_s)


def _probes(container: Doc, http_port: int, group: Doc) -> Iterator[str]:
    for kind in ("startupProbe", "readinessProbe"):
        if kind not in container:
            yield f"{kind}: missing"
            return
    for kind in ("startupProbe", "livenessProbe"):
        text = str(container.get(kind, ""))
        if str(http_port) in text or "'serve'" in text:
            yield f"{kind}: must not ask Serve, or a worker without a replica is killed"
    startup = container["startupProbe"]
    budget_s = startup.get("periodSeconds", 10) * startup.get("failureThreshold", 3)
    if budget_s < STARTUP_S:
        yield f"startupProbe: must allow {STARTUP_S} s, got {budget_s}"
    if "groupName" not in group:
        return
    readiness = container["readinessProbe"]
    command = " ".join(readiness.get("exec", {}).get("command", ()))
    for url in (f":{RAYLET_PORT}/api/healthz", f":{http_port}/-/healthz"):
        if url not in command:
            yield f"readinessProbe: must ask {url}, got {command!r}"
    waits_s = sum(map(int, re.findall(r"-T (\d+)", command)))
    if readiness.get("timeoutSeconds", 1) <= waits_s:
        yield f"readinessProbe.timeoutSeconds: must exceed the command's own {waits_s}"
    if readiness.get("failureThreshold", 3) != 1:
        yield "readinessProbe.failureThreshold: must be 1, as KubeRay has it"


def _end_of_pod(group: Doc, drain_s: float) -> Iterator[str]:
    name = group["groupName"]
    hook = ray_container(group).get("lifecycle", {}).get("preStop", {})
    command = hook.get("exec", {}).get("command", [])
    if len(command) != 2 or command[0] != "sleep":
        yield f"{name}: preStop must sleep while the open streams end, got {command}"
        return
    pre_stop_s, grace_s = int(command[1]), pod(group).get("terminationGracePeriodSeconds", 30)
    if pre_stop_s < ENDPOINTS_S + drain_s:
        yield f"{name}: preStop must sleep {ENDPOINTS_S} + {drain_s} s, got {pre_stop_s}"
    if grace_s < pre_stop_s + MARGIN_S:
        wanted_s = pre_stop_s + MARGIN_S
        yield f"{name}: terminationGracePeriodSeconds must be {wanted_s}, got {grace_s}"


# --------------------------------------------------------------------------------------------------
# Sizing
# --------------------------------------------------------------------------------------------------


def sizing(doc: Doc) -> Iterator[str]:
    """One replica on each worker, wherever Ray puts the routers, and nothing on the head."""
    app, cluster = _app(doc), doc["spec"]["rayClusterConfig"]
    head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    if head.get("rayStartParams", {}).get("num-cpus") != "0":
        yield "head: rayStartParams.num-cpus must be '0'"
    version = dockerfile_args(dockerfile((K8S / "Dockerfile").read_text()))["RAY_VERSION"]
    if cluster["rayVersion"] != version:
        yield f"rayVersion: must be the image's {version}, got {cluster['rayVersion']}"
    for group in groups(doc):
        name = group.get("groupName", "head")
        yield from (f"{name}: {problem}" for problem in _memory(group))
    counts = {workers.get(key) for key in ("replicas", "minReplicas", "maxReplicas")}
    if counts != {app.replicas}:
        yield f"{workers['groupName']}: must have {app.replicas} workers, one a replica, got {counts}"
    limits = ray_container(workers).get("resources", {}).get("limits", {})
    cpus, gpus = quantity(limits.get("cpu", 0)), quantity(limits.get("nvidia.com/gpu", 0))
    per_replica = app.replica_resources.num_cpus
    if per_replica + app.routers * app.router_resources.num_cpus > cpus:
        yield f"worker CPUs: one replica and all routers must fit {cpus}"
    if app.device == "cuda":
        if gpus != (app.replica_resources.num_gpus or 1):
            yield f"worker GPUs: must be what one replica reserves, got {gpus}"
        if not pod(workers).get("tolerations"):
            yield "tolerations: GPU nodes are tainted"
    else:
        if 2 * per_replica <= cpus:
            yield f"replica_resources.num_cpus: two replicas of {per_replica} must not fit {cpus}"
        if app.engine.num_threads != cpus:
            yield f"engine.num_threads: must be the worker's {cpus}, got {app.engine.num_threads}"


def _memory(group: Doc) -> Iterator[str]:
    resources = ray_container(group).get("resources", {})
    for side in ("requests", "limits"):
        for what in ("cpu", "memory"):
            if what not in resources.get(side, {}):
                yield f"resources.{side}.{what}: missing"
                return
    if resources["requests"]["memory"] != resources["limits"]["memory"]:
        yield "resources: memory request and limit must be equal, or the node may run out"
    store_bytes = int(group.get("rayStartParams", {}).get("object-store-memory", 0))
    shm = [v["emptyDir"] for v in pod(group)["volumes"] if v.get("emptyDir", {}).get("medium")]
    shm_bytes = quantity(shm[0]["sizeLimit"]) if shm else 0
    if not 0 < store_bytes <= shm_bytes < quantity(resources["limits"]["memory"]):
        yield f"object-store-memory: {store_bytes} must fit /dev/shm ({shm_bytes}), this the limit"


CHECKS = (schema, serve, operator, safety, traffic, sizing)
