"""What the objects of one overlay must satisfy together. Each check yields one sentence for each thing wrong."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from quire.cluster.config import serve_config
from quire.cluster.config.app_config import AppConfig

from .manifests import containers, groups, pod, quantity, ray_container, rayservice

Doc = dict[str, Any]

NAMESPACE = "kubernetes.io/metadata.name"
CLIENT = {"quire-client": "true"}
PART_OF = {"app.kubernetes.io/part-of": "quire"}
DNS = {"k8s-app": "kube-dns"}
MONITORED = (8000, 8080, 44227)
# Nothing in a cluster, and no cloud's metadata, may be reached as "the Internet".
PRIVATE = ("10.0.0.0/8", "100.64.0.0/10", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16")


def of_kind(docs: list[Doc], kind: str) -> list[Doc]:
    """The objects of a kind."""
    return [doc for doc in docs if doc["kind"] == kind]


def _args(docs: list[Doc]) -> AppConfig:
    text = rayservice(docs)["spec"]["serveConfigV2"]
    (application,) = serve_config.check(serve_config.parse_yaml(text)).applications
    assert application.config is not None
    return application.config


def _labels(group: Doc) -> dict[str, str]:
    """The labels of a group's pods; KubeRay adds the node type."""
    kind = "worker" if "groupName" in group else "head"
    return group["template"]["metadata"]["labels"] | {"ray.io/node-type": kind}


# --------------------------------------------------------------------------------------------------
# Network
# --------------------------------------------------------------------------------------------------


def network(docs: list[Doc]) -> Iterator[str]:
    """Everything is closed but what a rule opens, and each rule names who is meant."""
    policies = of_kind(docs, "NetworkPolicy")
    (main,) = (p for p in policies if p["metadata"]["name"] == "quire")
    if main["spec"]["policyTypes"] != ["Ingress", "Egress"]:
        yield "NetworkPolicy quire: must deny both directions by default"
    for group in groups(rayservice(docs)):
        if not main["spec"]["podSelector"]["matchLabels"].items() <= _labels(group).items():
            yield f"NetworkPolicy quire: must select the pods with {_labels(group)}"
    for policy in policies:
        name = policy["metadata"]["name"]
        for rule in policy["spec"].get("ingress", ()):
            yield from (f"{name}: {p}" for p in _rule(rule, rule.get("from", [])))
        for rule in policy["spec"].get("egress", ()):
            yield from (f"{name}: {p}" for p in _rule(rule, rule.get("to", [])))
            yield from (f"{name}: {p}" for p in _egress(policy, rule))
    yield from _clients(docs, main)


def _rule(rule: Doc, peers: list[Doc]) -> Iterator[str]:
    if not peers:
        yield "a rule without peers opens a port to every address"
    for peer in peers:
        space, pods = peer.get("namespaceSelector"), peer.get("podSelector")
        labels = (space or {}).get("matchLabels", {})
        if space is not None and NAMESPACE not in labels and labels != CLIENT:
            yield f"must name the namespaces, got {space}"
        if space is None and pods is not None and not pods.get("matchLabels"):
            yield "must not open a port to every pod of the namespace"
        own = space is None and (pods or {}).get("matchLabels") == PART_OF
        if "ports" not in rule and not own:
            yield f"only Quire's own pods may use every port, got {peer}"


def _egress(policy: Doc, rule: Doc) -> Iterator[str]:
    ports = {p["port"] for p in rule.get("ports", ())}
    for peer in rule.get("to", ()):
        if 53 in ports and (
            peer.get("podSelector", {}).get("matchLabels") != DNS
            or peer.get("namespaceSelector", {}).get("matchLabels") != {NAMESPACE: "kube-system"}
        ):
            yield f"port 53 is for the cluster's DNS only, got {peer}"
        if "ipBlock" not in peer:
            continue
        block = ipaddress.ip_network(peer["ipBlock"]["cidr"])
        selected = policy["spec"]["podSelector"]["matchLabels"].get("ray.io/node-type")
        if block.is_private and selected == "head" and ports <= {443, 6443}:
            continue  # the API server
        if selected != "worker" or ports != {443}:
            yield f"only workers may reach {block}, on port 443, got {selected} and {ports}"
        missing = set(PRIVATE) - set(peer["ipBlock"].get("except", ()))
        if block.prefixlen == 0 and missing:
            yield f"the Internet does not include {sorted(missing)}"


def _clients(docs: list[Doc], policy: Doc) -> Iterator[str]:
    """Who may connect to which ports."""
    config, args = serve_config.parse_yaml(rayservice(docs)["spec"]["serveConfigV2"]), _args(docs)
    plain = {config["http_options"]["port"], config["grpc_options"]["port"]}
    wanted = {args.tls.http_port, args.tls.grpc_port} if args.tls else plain
    for rule in policy["spec"]["ingress"]:
        ports = {p["port"] for p in rule.get("ports", ())}
        labels = [
            peer.get("podSelector", {}).get("matchLabels", {}) for peer in rule.get("from", ())
        ]
        if any(
            peer.get("namespaceSelector", {}).get("matchLabels") == CLIENT
            for peer in rule.get("from", ())
        ):
            if ports != wanted:
                yield f"clients: must reach {sorted(wanted)} only, got {sorted(ports)}"
        elif {"app.kubernetes.io/component": "kuberay-operator"} in labels:
            if ports != {8265}:
                yield f"operator: needs the dashboard's port alone, got {sorted(ports)}"
        elif {"app.kubernetes.io/name": "prometheus"} in labels:
            if ports != set(MONITORED):
                yield f"Prometheus: needs {MONITORED}, got {sorted(ports)}"
        elif PART_OF not in labels:
            yield f"unknown clients: {rule}"


# --------------------------------------------------------------------------------------------------
# Disruption
# --------------------------------------------------------------------------------------------------


def disruption(docs: list[Doc]) -> Iterator[str]:
    """Evictions take one worker at a time; the pods have a priority; head and workers prefer different nodes."""
    head, (workers,) = groups(rayservice(docs))[0], groups(rayservice(docs))[1:]
    (budget,) = of_kind(docs, "PodDisruptionBudget")
    spec = budget["spec"]
    # For pods whose controller has no scale subresource, Kubernetes knows nothing else than a number of pods.
    if "maxUnavailable" in spec or not isinstance(spec.get("minAvailable"), int):
        yield f"PodDisruptionBudget: minAvailable must be a number of pods, got {spec}"
    elif spec["minAvailable"] != workers["minReplicas"] - 1:
        yield f"PodDisruptionBudget: minAvailable must be {workers['minReplicas'] - 1}, one less than the workers"
    wanted = spec["selector"]["matchLabels"].items()
    if not wanted <= _labels(workers).items() or wanted <= _labels(head).items():
        yield f"PodDisruptionBudget: must select the workers alone, got {dict(wanted)}"
    classes = {doc["metadata"]["name"]: doc for doc in of_kind(docs, "PriorityClass")}
    for group in (head, workers):
        name = pod(group).get("priorityClassName")
        if name not in classes:
            yield f"priorityClassName: no class {name!r} is here"
        elif not 0 < classes[name]["value"] < 10**9 or classes[name].get("globalDefault"):
            yield f"PriorityClass {name}: must be above 0, below the system's, and no default"
    yield from _spread(head, workers)


def _spread(head: Doc, workers: Doc) -> Iterator[str]:
    (spread,) = pod(workers).get("topologySpreadConstraints") or ({},)
    if spread.get("topologyKey") != "kubernetes.io/hostname":
        yield "topologySpreadConstraints: workers must spread over nodes"
    elif not spread["labelSelector"]["matchLabels"].items() <= _labels(workers).items():
        yield "topologySpreadConstraints: must select the workers"
    terms = pod(head).get("affinity", {}).get("podAntiAffinity", {})
    preferred = terms.get("preferredDuringSchedulingIgnoredDuringExecution", [])
    selectors = [t["podAffinityTerm"]["labelSelector"]["matchLabels"].items() for t in preferred]
    if not any(selector <= _labels(workers).items() for selector in selectors):
        yield "affinity: the head must prefer a node without workers"


# --------------------------------------------------------------------------------------------------
# Secrets, claims and the model
# --------------------------------------------------------------------------------------------------


def files(docs: list[Doc]) -> Iterator[str]:
    """What the arguments name is mounted, and what is mounted exists; the model is fetched before Ray starts."""
    if of_kind(docs, "Secret"):
        yield "Secret: no manifest may hold one"
    args, workers = _args(docs), groups(rayservice(docs))[1]
    paths = {"quire-keys": [], "quire-tls": []}
    if args.auth:
        paths["quire-keys"] = [args.auth.key_file]
    if args.tls:
        paths["quire-tls"] = [args.tls.certificate_file, args.tls.key_file]
    for secret, wanted in paths.items():
        yield from _secret(workers, secret, wanted)
    claims = {doc["metadata"]["name"] for doc in of_kind(docs, "PersistentVolumeClaim")}
    used = {
        volume["persistentVolumeClaim"]["claimName"]
        for group in groups(rayservice(docs))
        for volume in pod(group)["volumes"]
        if "persistentVolumeClaim" in volume
    }
    if used != claims:
        yield f"claims: {sorted(used)} are used and {sorted(claims)} are here"
    yield from _model(workers, args)
    yield from _certificate(docs, args)


def _secret(workers: Doc, secret: str, paths: list[str]) -> Iterator[str]:
    volumes = {v["name"]: v["secret"] for v in pod(workers)["volumes"] if "secret" in v}
    names = [name for name, source in volumes.items() if source["secretName"] == secret]
    if bool(names) != bool(paths):
        yield f"secret {secret}: mounted by {names}, named by the arguments {paths}"
        return
    mounts = {m["name"]: m for m in ray_container(workers)["volumeMounts"]}
    for name in names:
        if volumes[name].get("optional") or volumes[name].get("defaultMode") != 0o440:
            yield f"secret {secret}: must be required, with mode 0440, got {volumes[name]}"
        if not mounts.get(name, {}).get("readOnly"):
            yield f"secret {secret}: must be mounted, read-only"
            continue
        for path in paths:
            if PurePosixPath(mounts[name]["mountPath"]) not in PurePosixPath(path).parents:
                yield f"secret {secret}: {path} is not below {mounts[name]['mountPath']}"


def _certificate(docs: list[Doc], args: AppConfig) -> Iterator[str]:
    certificates = of_kind(docs, "Certificate")
    if bool(certificates) != bool(args.tls):
        yield "Certificate: needs the section tls, and the section needs it"
    service = f"{rayservice(docs)['metadata']['name']}-serve-svc"
    space = rayservice(docs)["metadata"].get("namespace", "default")
    for certificate in certificates:
        spec = certificate["spec"]
        for name in (service, f"{service}.{space}.svc"):
            if name not in spec["dnsNames"] and "." in name:
                yield f"Certificate: dnsNames must have {name}"
        if spec["secretName"] != "quire-tls" or "server auth" not in spec["usages"]:
            yield "Certificate: must write quire-tls, for servers"
        hours = [int(spec[key].rstrip("h")) for key in ("renewBefore", "duration")]
        if not 0 < hours[0] <= hours[1] / 2:
            yield f"Certificate: must be renewed before its end, got {hours}"
        head_ports = {
            p["containerPort"] for p in ray_container(groups(rayservice(docs))[0])["ports"]
        }
        if args.tls and not {args.tls.http_port, args.tls.grpc_port} <= head_ports:
            yield "Service: takes its ports from the head's, which lack those of TLS"


def _model(workers: Doc, args: AppConfig) -> Iterator[str]:
    fetches = [
        c
        for c in pod(workers).get("initContainers", ())
        if c["command"][:3] == ["quire", "model", "fetch"]
    ]
    is_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", args.model) is not None
    if is_hub != (len(fetches) == 1):
        yield f"model {args.model}: needs a container that fetches it if it is of the hub, and none else"
        return
    for fetch in fetches:
        if not re.fullmatch(r"[0-9a-f]{40}", args.revision or ""):
            yield f"revision: must be a commit, which never changes, got {args.revision!r}"
        if fetch["command"][3:5] != [args.model, f"--revision={args.revision}"]:
            yield f"{fetch['name']}: must fetch {args.model} at {args.revision}, got {fetch['command']}"
        both = [
            {(m["name"], m["mountPath"]) for m in c["volumeMounts"]}
            for c in (fetch, ray_container(workers))
        ]
        if not any(name == "model-cache" for name, _ in both[0] & both[1]):
            yield f"{fetch['name']}: must share the model's volume with the server"


# --------------------------------------------------------------------------------------------------
# Routes, and what clients that pay get
# --------------------------------------------------------------------------------------------------


def routes(docs: list[Doc]) -> Iterator[str]:
    """gRPC reaches the ready workers of both clusters of an incremental upgrade."""
    spec = rayservice(docs)["spec"]
    upgrade = spec.get("upgradeStrategy", {}).get("clusterUpgradeOptions")
    gateways = {doc["metadata"]["name"]: doc for doc in of_kind(docs, "Gateway")}
    services = {doc["metadata"]["name"]: doc for doc in of_kind(docs, "Service")}
    grpc_routes = of_kind(docs, "GRPCRoute")
    if bool(upgrade) != bool(grpc_routes):
        yield "GRPCRoute: an incremental upgrade needs one, and only that"
    if f"{rayservice(docs)['metadata']['name']}-gateway" in gateways:
        yield "Gateway: KubeRay has one of this name and overwrites it"
    workers = groups(rayservice(docs))[1]
    for gateway in gateways.values():
        if upgrade and gateway["spec"]["gatewayClassName"] != upgrade["gatewayClassName"]:
            yield "Gateway: must have the class of KubeRay's"
    for route in grpc_routes:
        for parent in route["spec"]["parentRefs"]:
            listeners = {
                item["name"]: item
                for item in gateways.get(parent["name"], {"spec": {"listeners": []}})["spec"][
                    "listeners"
                ]
            }
            kinds = listeners.get(parent["sectionName"], {}).get("allowedRoutes", {}).get("kinds")
            if kinds != [{"kind": "GRPCRoute"}]:
                yield f"GRPCRoute: {parent} is no listener for gRPC alone"
        for rule in route["spec"]["rules"]:
            for backend in rule["backendRefs"]:
                yield from _backend(services.get(backend["name"]), backend, workers)


def _backend(service: Doc | None, backend: Doc, workers: Doc) -> Iterator[str]:
    ports = {p["port"]: p for p in service["spec"]["ports"]} if service else {}
    port = ports.get(backend["port"])
    if service is None or port is None:
        yield f"GRPCRoute: there is no Service {backend}"
        return
    if port.get("appProtocol") != "kubernetes.io/h2c":
        yield "Service: gateways speak HTTP/1 without appProtocol kubernetes.io/h2c"
    if port["targetPort"] not in {p["name"] for p in ray_container(workers)["ports"]}:
        yield f"Service: workers have no port {port['targetPort']}"
    selector = service["spec"]["selector"].items()
    if not selector <= _labels(workers).items() or ("ray.io/node-type", "worker") not in selector:
        yield f"Service: must select the workers alone, got {dict(selector)}"


def pinned(docs: list[Doc]) -> Iterator[str]:
    """For clients that pay: digests, a namespace that restricts its pods, a quota that an upgrade fits."""
    service = rayservice(docs)
    for group in groups(service):
        for container in containers(group):
            if not re.search(r"@sha256:[0-9a-f]{64}$", container["image"]):
                yield f"{container['name']}: image must have a digest, got {container['image']}"
        for container in pod(group).get("initContainers", ()):
            if not any(
                re.fullmatch(r"--digest=sha256:[0-9a-f]{64}", a) for a in container["command"]
            ):
                yield f"{container['name']}: must check the model's digest"
    (space,) = of_kind(docs, "Namespace") or ({"metadata": {"name": "", "labels": {}}},)
    if space["metadata"]["labels"].get("pod-security.kubernetes.io/enforce") != "restricted":
        yield "Namespace: must enforce restricted pods"
    for doc in docs:
        if doc["kind"] not in {"Namespace", "PriorityClass"}:
            if doc["metadata"].get("namespace") != space["metadata"]["name"]:
                yield f"{doc['kind']}: must be in the namespace {space['metadata']['name']}"
    args, workers = _args(docs), groups(service)[1]
    if not (args.auth and args.tls):
        yield "args: keys and TLS are missing"
    (quota,) = of_kind(docs, "ResourceQuota") or ({"spec": {"hard": {}}},)
    gpus = quantity(ray_container(workers)["resources"]["limits"].get("nvidia.com/gpu", 0))
    allowed = quantity(quota["spec"]["hard"].get("requests.nvidia.com/gpu", 0))
    if allowed != 2 * workers["maxReplicas"] * gpus:
        yield f"ResourceQuota: must allow the GPUs of two clusters, got {allowed}"


CHECKS = (network, disruption, files, routes)
