"""What a RayService must satisfy. Each check yields one sentence for each thing wrong.

`schema`: the CRDs and the core API. `serve`: the text inside. `operator`: KubeRay's own rules (`kuberay_rules.py`).
`safety`, `traffic` and `sizing`: Quire's own. `overlay_checks.py` has the rules for several objects.
"""

from __future__ import annotations

import argparse
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
from quire.cluster.drain_command import add_drain_node

from .kuberay_rules import operator
from .manifests import (
    containers,
    flatten,
    groups,
    lock,
    pod,
    quantity,
    ray_container,
)

Doc = dict[str, Any]

RAYLET_PORT = 52365  # Ray's dashboard agent: /api/healthz
STARTUP_S = 600  # as long as KubeRay's own liveness probe waits (120 x 5 s)
# Until another worker has a router and a replica. Serve stops the old ones after that, or in time for the deadline.
REPLACEMENT_S = 60
MARGIN_S = 10
REACHABLE_S, END_S = (
    30.0,
    5.0,
)  # as in cluster/app.py, which takes seconds to import; a test compares
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
# Safety
# --------------------------------------------------------------------------------------------------


def safety(doc: Doc) -> Iterator[str]:
    """Images, privileges, secrets, writable places."""
    images = {c["image"] for group in groups(doc) for c in containers(group)}
    if len(images) != 1:
        yield f"image: head and workers must run the same one, got {sorted(images)}"
    for image in images:
        name = image.rpartition("/")[2]
        if "@" not in name and name.partition(":")[2] in {"", "latest"}:
            yield f"image: must have a digest, or a tag other than latest, got {image!r}"
    for path, value in flatten(doc).items():
        if re.search(r"hostPath|hostNetwork|hostPID|hostIPC|privileged$", path) and value:
            yield f"{path}: must not be set, got {value!r}"
    for group in groups(doc):
        name = group.get("groupName", "head")
        yield from (f"{name}: {problem}" for problem in _privileges(group))
        yield from (f"{name}: {problem}" for problem in _secrets(group))
        for container in containers(group):
            yield from (f"{name}: {problem}" for problem in _writable(pod(group), container))
    yield from _api_token(doc["spec"]["rayClusterConfig"])


def _privileges(group: Doc) -> Iterator[str]:
    spec = pod(group)
    context = spec.get("securityContext", {})
    wanted = {"runAsNonRoot": True, "runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000}
    for key, value in wanted.items():
        if context.get(key) != value:
            yield f"securityContext.{key}: must be {value}, got {context.get(key)}"
    if context.get("seccompProfile") != {"type": "RuntimeDefault"}:
        yield f"seccompProfile: must be RuntimeDefault, got {context.get('seccompProfile')}"
    if spec.get("automountServiceAccountToken") is not False:
        yield "automountServiceAccountToken: must be false; Ray does not call the API server"
    for container in containers(group):
        yield from _container_privileges(container)


def _container_privileges(container: Doc) -> Iterator[str]:
    name, own = container.get("name", "autoscaler"), container.get("securityContext", {})
    if own.get("allowPrivilegeEscalation") is not False:
        yield f"{name}: allowPrivilegeEscalation must be false"
    if own.get("readOnlyRootFilesystem") is not True:
        yield f"{name}: readOnlyRootFilesystem must be true"
    if own.get("capabilities") != {"drop": ["ALL"]}:
        yield f"{name}: must drop ALL capabilities and add none"


def _api_token(cluster: Doc) -> Iterator[str]:
    """The token of the API server is for the autoscaler alone, which needs it."""
    tokens = {
        volume["name"]
        for volume in pod(cluster["headGroupSpec"]).get("volumes", ())
        if "serviceAccountToken" in str(volume.get("projected"))
    }
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        for container in containers(group):
            if tokens & {m["name"] for m in container.get("volumeMounts", ())}:
                yield f"{container['name']}: must not mount the API server's token"
    if not cluster.get("enableInTreeAutoscaling"):
        return
    options = cluster.get("autoscalerOptions", {})
    yield from _container_privileges(options)
    mounts = {m["mountPath"]: m["name"] for m in options.get("volumeMounts", ())}
    if mounts.get("/var/run/secrets/kubernetes.io/serviceaccount") not in tokens:
        yield "autoscaler: must mount a token of the API server, which the pod does not mount"
    if "/tmp" not in mounts:
        yield "autoscaler: /tmp must be writable"


def _secrets(group: Doc) -> Iterator[str]:
    for container in containers(group):
        for item in container.get("env", ()):
            reference = item.get("valueFrom", {}).get("secretKeyRef")
            if _SECRET_NAME.search(item["name"]) and reference is None:
                yield f"env {item['name']}: must come from a secretKeyRef"
    serving = {item["name"]: item.get("value") for item in ray_container(group).get("env", ())}
    if "HF_TOKEN" in serving:
        yield "env HF_TOKEN: only the container that fetches the model may have it"
    if serving.get("HF_HUB_OFFLINE") != "1":
        yield "env HF_HUB_OFFLINE: must be '1'; the server downloads nothing"


def _writable(spec: Doc, container: Doc) -> Iterator[str]:
    volumes = {volume["name"] for volume in spec.get("volumes", ())}
    mounts = {m["mountPath"]: m for m in container.get("volumeMounts", ())}
    env = {item["name"]: item.get("value") for item in container.get("env", ())}
    for mount in mounts.values():
        if mount["name"] not in volumes:
            yield f"mount {mount['mountPath']}: no volume is called {mount['name']!r}"
    needed = {env.get("HOME"), env.get("HF_HOME")}
    if container is spec["containers"][0]:
        needed |= {"/tmp/ray", "/tmp/haproxy-serve", "/dev/shm"}
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
    if command[:2] != ["quire", "drain-node"]:
        yield f"{name}: preStop must be `quire drain-node`, got {command}"
        return
    # As the installed command reads it.
    parser = argparse.ArgumentParser()
    add_drain_node(parser.add_subparsers())
    try:
        deadline_s = parser.parse_args(command[1:]).deadline_s
    except SystemExit:
        yield f"{name}: preStop: `quire drain-node` does not know {command[2:]}"
        return
    # The last moment at which Serve stops a router, if it is to have its whole grace: see cluster/app.py.
    router_s = REACHABLE_S + drain_s + END_S
    if deadline_s < REPLACEMENT_S + router_s:
        wanted = f"{REPLACEMENT_S} s for replacements and {router_s} s for routers"
        yield f"{name}: preStop's deadline must allow {wanted}, got {deadline_s}"
    grace_s = pod(group).get("terminationGracePeriodSeconds", 30)
    if grace_s < deadline_s + MARGIN_S:
        wanted_s = deadline_s + MARGIN_S
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
    version, _ = lock("requirements.lock")["ray"]
    if cluster["rayVersion"] != version:
        yield f"rayVersion: must be the image's {version}, got {cluster['rayVersion']}"
    for group in groups(doc):
        name = group.get("groupName", "head")
        if problems := list(_memory(group)):
            yield from (f"{name}: {problem}" for problem in problems)
            return
        yield from (f"{name}: {problem}" for problem in _disk(group))
    yield from _worker_counts(workers, app, bool(cluster.get("enableInTreeAutoscaling")))
    limits = ray_container(workers).get("resources", {}).get("limits", {})
    cpus, gpus = quantity(limits.get("cpu", 0)), quantity(limits.get("nvidia.com/gpu", 0))
    per_replica = app.replica_resources.num_cpus
    if per_replica + app.routers * app.router_resources.num_cpus > cpus:
        yield f"worker CPUs: one replica and all routers must fit {cpus}"
    if app.device == "cuda":
        if gpus != (app.replica_resources.num_gpus or 1):
            yield f"worker GPUs: must be what one replica reserves, got {gpus}"
        if not any(t.get("key") == "nvidia.com/gpu" for t in pod(workers).get("tolerations", ())):
            yield "tolerations: GPU nodes are tainted"
        yield from _node_pool(workers, app)
    else:
        if 2 * per_replica <= cpus:
            yield f"replica_resources.num_cpus: two replicas of {per_replica} must not fit {cpus}"
        if app.engine.num_threads != cpus:
            yield f"engine.num_threads: must be the worker's {cpus}, got {app.engine.num_threads}"


def _node_pool(workers: Doc, app: AppConfig) -> Iterator[str]:
    """The node's pool is in /dev/shm, as is Ray's object store; /dev/shm counts towards the pod's limit."""
    shm = sum(
        quantity(v["emptyDir"]["sizeLimit"]) for v in pod(workers)["volumes"] if "Memory" in str(v)
    )
    limit = quantity(ray_container(workers)["resources"]["limits"]["memory"])
    room = shm - int(workers["rayStartParams"]["object-store-memory"])
    if app.engine.node_pool_gib is None:
        # The default is half of the room. Less than 4 GiB is of little use for a GPU.
        if room < 8 * 2**30:
            yield f"volume shm: {shm} leaves {room} besides Ray's object store"
    elif room < app.engine.node_pool_gib * 2**30:
        yield f"engine.node_pool_gib: {app.engine.node_pool_gib} GiB must fit into {room}"
    if limit < 2 * shm:
        yield f"memory: half of {limit} must hold /dev/shm ({shm})"


def _worker_counts(workers: Doc, app: AppConfig, autoscaling: bool) -> Iterator[str]:
    """One worker for each replica, at all numbers of replicas."""
    scaling = app.autoscaling
    if autoscaling != (scaling is not None):
        yield "autoscaling: needs both enableInTreeAutoscaling and the section autoscaling"
        return
    least = scaling.min_replicas if scaling else app.replicas
    most = scaling.max_replicas if scaling else app.replicas
    wanted = {"replicas": app.replicas, "minReplicas": least, "maxReplicas": most}
    if (counts := {key: workers.get(key) for key in wanted}) != wanted:
        yield f"{workers['groupName']}: must have {wanted} workers, one a replica, got {counts}"


def _disk(group: Doc) -> Iterator[str]:
    """The node's disk: what a pod may fill is bounded, and the bound is below that at which it is evicted."""
    total = 0.0
    for volume in pod(group)["volumes"]:
        if "emptyDir" not in volume:
            continue
        if "sizeLimit" not in volume["emptyDir"]:
            yield f"volume {volume['name']}: sizeLimit is missing"
        elif "medium" not in volume["emptyDir"]:
            total += quantity(volume["emptyDir"]["sizeLimit"])
    limit = quantity(ray_container(group)["resources"]["limits"]["ephemeral-storage"])
    if limit < total + quantity("1Gi"):
        yield f"ephemeral-storage: {limit} must hold the volumes ({total}) and 1Gi of output"
    env = {item["name"]: item.get("value") for item in ray_container(group).get("env", ())}
    file_bytes = int(env.get("RAY_ROTATION_MAX_BYTES", 2**29))
    if file_bytes * (1 + int(env.get("RAY_ROTATION_BACKUP_COUNT", 5))) > quantity("256Mi"):
        yield "RAY_ROTATION_MAX_BYTES, _BACKUP_COUNT: one of Ray's logs must stay below 256Mi"


def _memory(group: Doc) -> Iterator[str]:
    for container in containers(group):
        for side in ("requests", "limits"):
            for what in ("cpu", "memory", "ephemeral-storage"):
                if what not in container.get("resources", {}).get(side, {}):
                    yield f"{container['name']}: resources.{side}.{what}: missing"
                    return
    resources = ray_container(group)["resources"]
    if resources["requests"]["memory"] != resources["limits"]["memory"]:
        yield "resources: memory request and limit must be equal, or the node may run out"
    store_bytes = int(group.get("rayStartParams", {}).get("object-store-memory", 0))
    shm = [v["emptyDir"] for v in pod(group)["volumes"] if v.get("emptyDir", {}).get("medium")]
    shm_bytes = quantity(shm[0]["sizeLimit"]) if shm else 0
    if not 0 < store_bytes <= shm_bytes < quantity(resources["limits"]["memory"]):
        yield f"object-store-memory: {store_bytes} must fit /dev/shm ({shm_bytes}), this the limit"


CHECKS = (schema, serve, operator, safety, traffic, sizing)
