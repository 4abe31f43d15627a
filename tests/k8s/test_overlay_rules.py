"""Each rule of `overlay_checks`, and each rule of KubeRay's for a component, finds a seeded fault."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from . import manifest_checks, overlay_checks
from .manifests import K8S, REMOVE, apply_operation, rayservice, render, seed_fault
from .overlay_checks import disruption, files, network, pinned, routes

CLUSTER = "/spec/rayClusterConfig"
HEAD = f"{CLUSTER}/headGroupSpec"
WORKERS = f"{CLUSTER}/workerGroupSpecs/0"
POD = f"{WORKERS}/template/spec"
WORKER = f"{POD}/containers/0"
POLICY, BUDGET = "NetworkPolicy/quire", "PodDisruptionBudget/quire-workers"
FETCH, AUTOSCALER = "NetworkPolicy/quire-model-fetch", "NetworkPolicy/quire-autoscaler"
SERVICE, CERTIFICATE = "RayService/quire", "Certificate/quire"
ANYWHERE = {"ipBlock": {"cidr": "0.0.0.0/0"}}
CLIENTS = {"namespaceSelector": {"matchLabels": {"quire-client": "true"}}}

# check, overlay, object, path in it, value (REMOVE: none), what the check must say
FAULTS: list[tuple[Callable[..., Any], str, str, str, Any, str]] = [
    (network, "base", POLICY, "/spec/policyTypes", ["Ingress"], "both directions"),
    (network, "base", POLICY, "/spec/podSelector/matchLabels/tier", "x", "must select the pods"),
    (network, "base", POLICY, "/spec/ingress/1/from", REMOVE, "every address"),
    (
        network,
        "base",
        POLICY,
        "/spec/ingress/2/from/0/namespaceSelector",
        {},
        "name the namespaces",
    ),
    (network, "base", POLICY, "/spec/ingress/1/from/0/podSelector", {}, "every pod of the"),
    (network, "base", POLICY, "/spec/ingress/1/ports", REMOVE, "only Quire's own pods"),
    (network, "base", POLICY, "/spec/ingress/1/ports/-", {"port": 6379}, "must reach [8000, 9000]"),
    (network, "base", POLICY, "/spec/ingress/2/ports/-", {"port": 6379}, "dashboard's port alone"),
    (network, "base", POLICY, "/spec/ingress/3/ports/-", {"port": 10001}, "Prometheus: needs"),
    (
        network,
        "base",
        POLICY,
        "/spec/ingress/-",
        {"from": [{"podSelector": {"matchLabels": {"a": "b"}}}], "ports": [{"port": 8000}]},
        "unknown clients",
    ),
    (network, "base", POLICY, "/spec/egress/1/to/0/podSelector", REMOVE, "the cluster's DNS only"),
    (network, "base", POLICY, "/spec/egress/1/to/-", ANYWHERE, "the cluster's DNS only"),
    (network, "base", POLICY, "/spec/egress/-", {"to": [ANYWHERE]}, "only workers may reach"),
    (
        network,
        "gpu",
        FETCH,
        "/spec/podSelector/matchLabels/ray.io~1node-type",
        REMOVE,
        "only workers",
    ),
    (network, "gpu", FETCH, "/spec/egress/0/ports/-", {"port": 80}, "only workers may reach"),
    (network, "gpu", FETCH, "/spec/egress/0/to/0/ipBlock/except/1", REMOVE, "100.64.0.0/10"),
    (network, "base+autoscale", AUTOSCALER, "/spec/egress/0/to/-", ANYWHERE, "only workers may"),
    (network, "base+autoscale", AUTOSCALER, "/spec/egress/0/ports/-", {"port": 22}, "only workers"),
    (network, "base+tls", POLICY, "/spec/ingress/1/ports/-", {"port": 8000}, "must reach [8443"),
    (disruption, "base", BUDGET, "/spec/minAvailable", "50%", "must be a number of pods"),
    (disruption, "base", BUDGET, "/spec/maxUnavailable", 1, "must be a number of pods"),
    (disruption, "base", BUDGET, "/spec/minAvailable", 2, "must be 1, one less"),
    (
        disruption,
        "base",
        BUDGET,
        "/spec/selector/matchLabels/ray.io~1node-type",
        REMOVE,
        "workers alone",
    ),
    (disruption, "base", SERVICE, f"{POD}/priorityClassName", REMOVE, "no class None"),
    (
        disruption,
        "base",
        SERVICE,
        f"{HEAD}/template/spec/priorityClassName",
        "high",
        "no class 'high'",
    ),
    (disruption, "base", "PriorityClass/quire", "/value", 2_000_000_000, "below the system's"),
    (disruption, "base", "PriorityClass/quire", "/globalDefault", True, "no default"),
    (disruption, "base", SERVICE, f"{POD}/topologySpreadConstraints", REMOVE, "must spread"),
    (
        disruption,
        "base",
        SERVICE,
        f"{POD}/topologySpreadConstraints/0/labelSelector/matchLabels/a",
        "b",
        "must select the workers",
    ),
    (disruption, "base", SERVICE, f"{HEAD}/template/spec/affinity", REMOVE, "the head must prefer"),
    (files, "base+auth", SERVICE, f"{POD}/volumes/3/secret/optional", True, "must be required"),
    (files, "base+auth", SERVICE, f"{POD}/volumes/3", REMOVE, "named by the arguments"),
    (files, "base+auth", SERVICE, f"{WORKER}/volumeMounts/3", REMOVE, "must be mounted"),
    (files, "base+auth", SERVICE, f"{WORKER}/volumeMounts/3/mountPath", "/keys", "is not below"),
    (
        files,
        "base+tls",
        CERTIFICATE,
        "/spec/dnsNames/1",
        REMOVE,
        "must have quire-serve-svc.default",
    ),
    (
        files,
        "production",
        CERTIFICATE,
        "/spec/dnsNames/1",
        "quire.default.svc",
        "quire-serve-svc.quire",
    ),
    (files, "base+tls", CERTIFICATE, "/spec/secretName", "tls", "must write quire-tls"),
    (files, "base+tls", CERTIFICATE, "/spec/renewBefore", "2160h", "before its end"),
    (files, "base+tls", CERTIFICATE, "/kind", "Issuer", "needs the section tls"),
    (
        files,
        "base+tls",
        SERVICE,
        f"{HEAD}/template/spec/containers/0/ports/7",
        REMOVE,
        "lack those",
    ),
    (files, "gpu", "PersistentVolumeClaim/quire-model-cache", "/kind", "X", "are used and []"),
    (files, "gpu", SERVICE, f"{POD}/initContainers", REMOVE, "needs a container that fetches"),
    (files, "gpu", SERVICE, f"{POD}/initContainers/0/command/4", "--revision=main", "must fetch"),
    (files, "gpu", SERVICE, f"{POD}/initContainers/0/volumeMounts/1", REMOVE, "share the model's"),
    (
        routes,
        "base+upgrade",
        "GRPCRoute/quire-grpc",
        "/kind",
        "X",
        "an incremental upgrade needs one",
    ),
    (
        routes,
        "base+upgrade",
        "Gateway/quire-grpc",
        "/metadata/name",
        "quire-gateway",
        "overwrites it",
    ),
    (
        routes,
        "base+upgrade",
        "Gateway/quire-grpc",
        "/spec/gatewayClassName",
        "x",
        "must have the class",
    ),
    (
        routes,
        "base+upgrade",
        "Gateway/quire-grpc",
        "/spec/listeners/0/allowedRoutes/kinds",
        REMOVE,
        "no listener for gRPC alone",
    ),
    (routes, "base+upgrade", "Service/quire-grpc", "/metadata/name", "x", "there is no Service"),
    (routes, "base+upgrade", "Service/quire-grpc", "/spec/ports/0/appProtocol", REMOVE, "HTTP/1"),
    (
        routes,
        "base+upgrade",
        "Service/quire-grpc",
        "/spec/ports/0/targetPort",
        "grpc",
        "no port grpc",
    ),
    (
        routes,
        "base+upgrade",
        "Service/quire-grpc",
        "/spec/selector/ray.io~1node-type",
        "head",
        "workers alone",
    ),
    (pinned, "production", SERVICE, f"{WORKER}/image", "quire:0.1.0", "image must have a digest"),
    (
        pinned,
        "production",
        SERVICE,
        f"{POD}/initContainers/0/command/5",
        "--digest=x",
        "model's digest",
    ),
    (
        pinned,
        "production",
        "Namespace/quire",
        "/metadata/labels/pod-security.kubernetes.io~1enforce",
        "baseline",
        "must enforce restricted",
    ),
    (pinned, "production", POLICY, "/metadata/namespace", REMOVE, "must be in the namespace quire"),
    (
        pinned,
        "production",
        "ResourceQuota/quire",
        "/spec/hard/requests.nvidia.com~1gpu",
        "8",
        "the GPUs of two clusters",
    ),
]
COMPONENTS = {"base+upgrade": ("autoscale", "upgrade")}
UPGRADE = "/spec/upgradeStrategy/clusterUpgradeOptions"
AUTOSCALING = f"{CLUSTER}/autoscalerOptions"
STORE = f"{CLUSTER}/gcsFaultToleranceOptions"
# check, overlay, path in the RayService, value, what the check must say
COMPONENT_FAULTS = [
    ("operator", "base+upgrade", f"{UPGRADE}/stepSizePercent", 0, "0 < step"),
    ("operator", "base+upgrade", f"{UPGRADE}/stepSizePercent", 60, "0 < step <= surge"),
    ("operator", "base+upgrade", f"{UPGRADE}/intervalSeconds", 0, "must be above 0"),
    ("operator", "base+upgrade", f"{UPGRADE}/gatewayClassName", "", "gatewayClassName: missing"),
    ("operator", "base+upgrade", "/spec/serveService", {}, "KubeRay ignores it"),
    ("operator", "base+autoscale", f"{AUTOSCALING}/version", "v1", "must be v2"),
    ("operator", "base+autoscale", f"{AUTOSCALING}/idleTimeoutSeconds", REMOVE, "at least 300"),
    ("operator", "base+autoscale", f"{POD}/restartPolicy", "Always", "must be Never"),
    ("operator", "base+ha", f"{STORE}/storage/claimName", "x", "ReadWriteOnce claim of KubeRay's"),
    ("operator", "base+ha", f"{STORE}/redisAddress", "x", "are not for rocksdb"),
    ("operator", "base+ha", f"{CLUSTER}/rayVersion", "2.56.0", "needs 2.57"),
    (
        "operator",
        "base+ha",
        f"{HEAD}/template/spec/containers/0/volumeMounts/-",
        {"name": "tmp", "mountPath": "/data/gcs"},
        "KubeRay's own",
    ),
    (
        "operator",
        "base+ha",
        f"{HEAD}/template/spec/containers/0/env/-",
        {"name": "RAY_gcs_storage", "value": "memory"},
        "KubeRay's own",
    ),
    ("safety", "base+autoscale", f"{AUTOSCALING}/securityContext", REMOVE, "autoscaler: must drop"),
    ("safety", "base+autoscale", f"{AUTOSCALING}/volumeMounts/1", REMOVE, "must mount a token"),
    ("safety", "base+autoscale", f"{AUTOSCALING}/volumeMounts/0", REMOVE, "/tmp must be writable"),
    (
        "safety",
        "base+autoscale",
        f"{HEAD}/template/spec/containers/0/volumeMounts/-",
        {"name": "api-token", "mountPath": "/token"},
        "must not mount the API server's token",
    ),
    ("safety", "gpu", f"{POD}/initContainers/0/securityContext", REMOVE, "fetch-model: must drop"),
    ("safety", "gpu", f"{POD}/initContainers/0/image", "quire:0.2.0", "same one"),
    ("safety", "gpu", f"{POD}/initContainers/0/volumeMounts/1", REMOVE, "/var/cache/quire: must"),
    ("sizing", "gpu", f"{POD}/initContainers/0/resources", REMOVE, "fetch-model: resources"),
    ("sizing", "base+autoscale", f"{WORKERS}/maxReplicas", 9, "one a replica"),
    ("sizing", "base+autoscale", f"{CLUSTER}/enableInTreeAutoscaling", False, "needs both"),
]


@cache
def rendered(overlay: str) -> list[dict[str, Any]]:
    folder, _, component = overlay.partition("+")
    components = COMPONENTS.get(overlay, (component,) if component else ())
    return render(K8S / folder, *components)


@pytest.mark.parametrize(
    ("check", "overlay", "name", "path", "value", "said"),
    FAULTS,
    ids=[f"{f[0].__name__}-{f[1]}-{f[5]}" for f in FAULTS],
)
def test_fault_is_found(
    check: Callable[..., Any], overlay: str, name: str, path: str, value: Any, said: str
) -> None:
    docs = copy.deepcopy(rendered(overlay))
    assert list(check(docs)) == []
    (doc,) = (d for d in docs if f"{d['kind']}/{d['metadata']['name']}" == name)
    seed_fault(doc, path, value)
    problems = list(check(docs))
    assert any(said in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("check", "overlay", "path", "value", "said"),
    COMPONENT_FAULTS,
    ids=[f"{f[0]}-{f[1]}-{f[4]}" for f in COMPONENT_FAULTS],
)
def test_fault_of_a_component_is_found(
    check: str, overlay: str, path: str, value: Any, said: str
) -> None:
    doc = copy.deepcopy(rayservice(rendered(overlay)))
    seed_fault(doc, path, value)
    problems = list(getattr(manifest_checks, check)(doc))
    assert any(said in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("overlay", "name", "path", "value"),
    [
        ("base", POLICY, "/spec/ingres", []),
        ("base", BUDGET, "/spec/minimum", 1),
        ("production", "ResourceQuota/quire", "/spec/soft", {}),
        ("base+tls", CERTIFICATE, "/spec/dnsName", "x"),
        ("base+upgrade", "Gateway/quire-grpc", "/spec/listeners/0/protocol", 3),
        ("base+upgrade", "GRPCRoute/quire-grpc", "/spec/rule", []),
    ],
)
def test_every_kind_is_checked_strictly(overlay: str, name: str, path: str, value: Any) -> None:
    docs = copy.deepcopy(rendered(overlay))
    (doc,) = (d for d in docs if f"{d['kind']}/{d['metadata']['name']}" == name)
    assert list(manifest_checks.schema(doc)) == []
    apply_operation(doc, "add", path, value)
    assert list(manifest_checks.schema(doc)) != []


@pytest.mark.parametrize("section", ["auth", "tls", "autoscaling"])
def test_a_missing_section_of_the_arguments_is_found(section: str) -> None:
    """What kustomize would do without the component's replacement."""
    overlay = {"autoscaling": "base+autoscale"}.get(section, f"base+{section}")
    docs = copy.deepcopy(rendered(overlay))
    spec = rayservice(docs)["spec"]
    lines = spec["serveConfigV2"].splitlines()
    spec["serveConfigV2"] = "\n".join(lines[: lines.index(f"      {section}:")])
    problems = [*overlay_checks.files(docs), *manifest_checks.sizing(rayservice(docs))]
    assert problems != []


def test_keys_without_their_secret_are_found() -> None:
    docs = copy.deepcopy(rendered("base"))
    rayservice(docs)["spec"]["serveConfigV2"] += "      auth: {key_file: /keys.json}\n"
    assert any("secret quire-keys" in problem for problem in overlay_checks.files(docs))
