"""The manifests are accepted, safe and consistent; each check is proven by a seeded fault."""

from __future__ import annotations

import copy
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from quire.cluster.config import serve_config

from . import manifest_checks as checks
from .manifests import (
    K8S,
    ROOT,
    apply_operation,
    flatten,
    groups,
    load,
    pod,
    ray_container,
    rayservice,
    render,
)

OVERLAYS = ("base", "gpu")
HEAD = "/spec/rayClusterConfig/headGroupSpec"
WORKERS = "/spec/rayClusterConfig/workerGroupSpecs/0"
WORKER = f"{WORKERS}/template/spec/containers/0"
REMOVE = object()

# What a pod needs beyond cluster.yaml, and nothing else.
IN_A_POD = {"http_options.host": "0.0.0.0"}
DIFFERENCES = {
    "base": IN_A_POD
    | {
        "applications[0].args.replica_resources.num_cpus": 1.5,
        "applications[0].args.engine.num_threads": 2,
    },
    "gpu": IN_A_POD
    | {
        "applications[0].args.model": "Qwen/Qwen3-8B",
        "applications[0].args.device": "cuda",
    },
}


@pytest.fixture(scope="module", params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def docs(overlay: str) -> list[dict[str, Any]]:
    return render(K8S / overlay)


# --------------------------------------------------------------------------------------------------
# The shipped files
# --------------------------------------------------------------------------------------------------


def test_every_document_fits_its_schema(docs: list[dict[str, Any]]) -> None:
    for doc in docs:
        assert list(checks.schema(doc)) == [], doc["kind"]


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_rayservice_passes(docs: list[dict[str, Any]], check: Callable[..., Any]) -> None:
    assert list(check(rayservice(docs))) == []


def test_serve_config_is_cluster_yaml_in_a_pod(overlay: str, docs: list[dict[str, Any]]) -> None:
    ours = flatten(serve_config.parse_yaml((ROOT / "cluster.yaml").read_text(encoding="utf-8")))
    theirs = flatten(serve_config.parse_yaml(rayservice(docs)["spec"]["serveConfigV2"]))
    allowed = DIFFERENCES[overlay]
    assert {path: theirs.get(path) for path in allowed} == allowed
    assert {path: v for path, v in theirs.items() if path not in allowed} == {
        path: v for path, v in ours.items() if path not in allowed
    }


def test_no_manifest_holds_a_secret(docs: list[dict[str, Any]]) -> None:
    assert "Secret" not in {doc["kind"] for doc in docs}


def test_selectors_find_the_pods(docs: list[dict[str, Any]]) -> None:
    (policy,) = (doc for doc in docs if doc["kind"] == "NetworkPolicy")
    quire, ray = load(K8S / "observability" / "podmonitor.yaml")
    for group in groups(rayservice(docs)):
        # KubeRay adds the second.
        kind = "worker" if "groupName" in group else "head"
        labels = group["template"]["metadata"]["labels"] | {"ray.io/node-type": kind}
        for selector in (policy["spec"]["podSelector"], ray["spec"]["selector"]):
            assert selector["matchLabels"].items() <= labels.items()
        # One answer is that of all processes: a second pod would add everything again.
        is_scraped = quire["spec"]["selector"]["matchLabels"].items() <= labels.items()
        assert is_scraped == (kind == "head")
        for spread in pod(group).get("topologySpreadConstraints", ()):
            # KubeRay adds this one itself.
            wanted = spread["labelSelector"]["matchLabels"].items() - {
                ("ray.io/node-type", "worker")
            }
            assert wanted <= labels.items()


def test_monitored_ports_exist_and_are_let_in(docs: list[dict[str, Any]]) -> None:
    (policy,) = (doc for doc in docs if doc["kind"] == "NetworkPolicy")
    quire, ray = load(K8S / "observability" / "podmonitor.yaml")
    ports: dict[str, int] = {}
    for group in groups(rayservice(docs)):
        ports |= {p["name"]: p["containerPort"] for p in ray_container(group)["ports"]}
    (own,) = quire["spec"]["podMetricsEndpoints"]
    assert own["path"] == "/metrics" and ports[own["port"]] == 8000
    monitored = {ports[e["port"]] for e in (own, *ray["spec"]["podMetricsEndpoints"])}
    prometheus = {"app.kubernetes.io/name": "prometheus"}
    (rule,) = (
        rule
        for rule in policy["spec"]["ingress"]
        if any(
            peer.get("podSelector", {}).get("matchLabels") == prometheus for peer in rule["from"]
        )
    )
    assert {p["port"] for p in rule["ports"]} == monitored
    let_in = {p["port"] for rule in policy["spec"]["ingress"] for p in rule.get("ports", ())}
    assert let_in == monitored | {ports["serve"], ports["serve-grpc"], ports["dashboard"]}


def test_network_policy_denies_by_default(docs: list[dict[str, Any]]) -> None:
    (policy,) = (doc for doc in docs if doc["kind"] == "NetworkPolicy")
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert all(rule.get("from") for rule in policy["spec"]["ingress"])
    own = [{"podSelector": policy["spec"]["podSelector"]}]
    for rule in policy["spec"]["ingress"]:
        assert rule.get("ports") or rule["from"] == own
    for rule in policy["spec"]["egress"]:
        assert rule.get("ports") or rule["to"] == own


def test_only_the_gpu_overlay_reaches_the_internet() -> None:
    for name, expected in (("base", 0), ("gpu", 1)):
        (policy,) = (doc for doc in render(K8S / name) if doc["kind"] == "NetworkPolicy")
        blocks = [
            t for rule in policy["spec"]["egress"] for t in rule.get("to", ()) if "ipBlock" in t
        ]
        assert len(blocks) == expected, name


def test_every_claim_is_in_the_overlay(docs: list[dict[str, Any]]) -> None:
    claims = {doc["metadata"]["name"] for doc in docs if doc["kind"] == "PersistentVolumeClaim"}
    used = {
        volume["persistentVolumeClaim"]["claimName"]
        for group in groups(rayservice(docs))
        for volume in pod(group)["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert used == claims


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kubectl_renders_the_same(overlay: str, docs: list[dict[str, Any]]) -> None:
    command = ["kubectl", "kustomize", str(K8S / overlay)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout

    def key(doc: dict[str, Any]) -> str:
        return doc["kind"]

    assert sorted(yaml.safe_load_all(printed), key=key) == sorted(docs, key=key)


# --------------------------------------------------------------------------------------------------
# Seeded faults
# --------------------------------------------------------------------------------------------------

# check, path in the base's RayService, value (REMOVE: none), what the check must say
FAULTS: list[tuple[Callable[..., Any], str, Any, str]] = [
    (checks.schema, "/spec/serveConfig", "x", "Additional properties"),
    (checks.schema, f"{WORKERS}/replicas", "two", "is not of type"),
    (checks.schema, f"{WORKER}/livenesProbe", {}, "Additional properties"),
    (checks.schema, "/apiVersion", "ray.io/v2", "no schema for ray.io/v2"),
    (checks.operator, "/metadata/name", "q" * 48, "at most 47"),
    (checks.operator, "/metadata/name", "9quire", "DNS-1035"),
    (checks.operator, f"{HEAD}/headService", {"metadata": {"name": "x"}}, "headService"),
    (
        checks.operator,
        "/spec/upgradeStrategy",
        {"type": "NewClusterWithIncrementalUpgrade"},
        "upgradeStrategy",
    ),
    (checks.operator, "/spec/rayClusterDeletionDelaySeconds", -1, "negative"),
    (checks.operator, "/spec/rayClusterConfig/networkPolicy", {"mode": "DenyAll"}, "feature gate"),
    (checks.operator, "/spec/rayClusterConfig/authOptions/mode", "disabled", "authOptions.mode"),
    (checks.operator, "/spec/rayClusterConfig/authOptions/enableK8sTokenAuth", True, "RayService"),
    (checks.operator, "/spec/rayClusterConfig/rayVersion", "2.51.0", "needs 2.52"),
    (checks.operator, f"{HEAD}/resources", {"CPU": "1"}, "both in rayStartParams"),
    (checks.operator, f"{HEAD}/rayStartParams/labels", "a=b", "labels is not supported"),
    (checks.operator, f"{HEAD}/rayStartParams/num-cpus", 0, "must be a string"),
    (checks.operator, f"{WORKERS}/minReplicas", REMOVE, "without autoscaling"),
    (checks.operator, f"{WORKERS}/minReplicas", 3, "minReplicas <= maxReplicas"),
    (checks.operator, f"{WORKERS}/suspend", True, "feature gate"),
    (
        checks.operator,
        f"{HEAD}/template/spec/containers/0/env/-",
        {"name": "RAY_REDIS_ADDRESS", "value": "redis:6379"},
        "RAY_REDIS_ADDRESS",
    ),
    (checks.operator, f"{HEAD}/template/spec/containers/0/ports/5/name", "grpc", "'serve-grpc'"),
    (checks.safety, f"{WORKER}/image", "quire:latest", "same one"),
    (checks.safety, f"{WORKERS}/template/spec/hostNetwork", True, "hostNetwork"),
    (checks.safety, f"{WORKERS}/template/spec/securityContext/runAsUser", 0, "runAsUser"),
    (
        checks.safety,
        f"{WORKERS}/template/spec/securityContext/seccompProfile",
        REMOVE,
        "seccompProfile",
    ),
    (checks.safety, f"{WORKERS}/template/spec/automountServiceAccountToken", REMOVE, "automount"),
    (checks.safety, f"{WORKER}/securityContext/allowPrivilegeEscalation", True, "Escalation"),
    (checks.safety, f"{WORKER}/securityContext/readOnlyRootFilesystem", REMOVE, "readOnlyRoot"),
    (checks.safety, f"{WORKER}/securityContext/capabilities/add", ["SYS_PTRACE"], "capabilities"),
    (checks.safety, f"{WORKER}/env/2", {"name": "HF_TOKEN", "value": "hf_x"}, "env HF_TOKEN"),
    (checks.safety, f"{WORKER}/volumeMounts/0", REMOVE, "/tmp/ray: must lie"),
    (checks.safety, f"{WORKER}/volumeMounts/2/readOnly", True, "/var/cache/quire: must lie"),
    (checks.safety, f"{WORKER}/volumeMounts/1/name", "shmem", "no volume is called 'shmem'"),
    (checks.traffic, "/spec/excludeHeadPodFromServeSvc", REMOVE, "excludeHeadPod"),
    (checks.traffic, f"{WORKER}/ports/0/containerPort", 8001, "port serve must be 8000"),
    (checks.traffic, f"{WORKER}/ports/2/name", "prometheus-metrics", "at most 15"),
    (checks.traffic, f"{WORKER}/startupProbe", REMOVE, "startupProbe: missing"),
    (checks.traffic, f"{WORKER}/startupProbe/httpGet/port", 8000, "must not ask Serve"),
    (checks.traffic, f"{WORKER}/startupProbe/failureThreshold", 12, "must allow 600 s, got 60"),
    (checks.traffic, f"{WORKER}/readinessProbe/exec/command", ["true"], "/-/healthz"),
    (checks.traffic, f"{WORKER}/readinessProbe/timeoutSeconds", 4, "must exceed"),
    (checks.traffic, f"{WORKER}/readinessProbe/failureThreshold", REMOVE, "must be 1"),
    (checks.traffic, f"{WORKER}/lifecycle", REMOVE, "preStop must sleep"),
    (checks.traffic, f"{WORKER}/lifecycle/preStop/exec/command/1", "30", "got 30"),
    (checks.traffic, f"{WORKERS}/template/spec/terminationGracePeriodSeconds", REMOVE, "got 30"),
    (checks.traffic, "/spec/rayClusterDeletionDelaySeconds", REMOVE, "at least 600"),
    (checks.sizing, f"{HEAD}/rayStartParams/num-cpus", REMOVE, "num-cpus must be '0'"),
    (checks.sizing, "/spec/rayClusterConfig/rayVersion", "2.59.0", "must be the image's"),
    (checks.sizing, f"{WORKER}/resources/limits/memory", REMOVE, "limits.memory: missing"),
    (checks.sizing, f"{WORKER}/resources/limits/memory", "8Gi", "must be equal"),
    (checks.sizing, f"{WORKERS}/rayStartParams/object-store-memory", "1073741824", "must fit"),
    (checks.sizing, f"{WORKERS}/maxReplicas", 3, "must have 2 workers"),
    (checks.sizing, f"{WORKER}/resources/limits/cpu", "1", "must fit 1.0"),
    (checks.sizing, f"{WORKER}/resources/limits/cpu", "4", "must not fit 4.0"),
]
# check, a line of the base's serveConfigV2, the lines in its place, what the check must say
SERVE_FAULTS: list[tuple[Callable[..., Any], str, list[str], str]] = [
    (checks.serve, "port: 8000", ["prt: 8000"], "unknown key"),
    (checks.serve, "replicas: 2", ["replicas: two"], "must be a valid integer"),
    (checks.serve, "port: 8000", ["port: 8000", "port: 8001"], "already"),
    (checks.traffic, "host: 0.0.0.0", ["host: 127.0.0.1"], "must be 0.0.0.0"),
    (checks.traffic, "port: 9000", ["port: 9001"], "port serve-grpc must be 9001"),
    (checks.traffic, "port: 8000", ["port: 8000", "request_timeout_s: 900"], "at least 900"),
    (checks.traffic, "replicas: 2", ["router: {drain_timeout_s: 60.0}"], "must sleep 15 + 60"),
    (checks.sizing, "num_cpus: 1.5", ["num_cpus: 1.0"], "must not fit"),
    (checks.sizing, "num_threads: 2", ["num_threads: 4"], "num_threads"),
    (checks.sizing, "replicas: 2", ["replicas: 4"], "must have 4 workers"),
]


@pytest.fixture(scope="module")
def base() -> dict[str, Any]:
    return rayservice(render(K8S / "base"))


@pytest.mark.parametrize(
    ("check", "path", "value", "said"), FAULTS, ids=[f"{f[0].__name__}-{f[3]}" for f in FAULTS]
)
def test_fault_is_found(
    base: dict[str, Any], check: Callable[..., Any], path: str, value: Any, said: str
) -> None:
    doc = copy.deepcopy(base)
    if value is REMOVE:
        apply_operation(doc, "remove", path)
    elif path.endswith("/-"):
        apply_operation(doc, "add", path, value)
    else:
        # In JSON 6902 `add` to a list inserts, so that an index needs `replace`.
        apply_operation(doc, "replace" if path[-1].isdigit() else "add", path, value)
    problems = list(check(doc))
    assert any(said in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("check", "old", "new", "said"),
    SERVE_FAULTS,
    ids=[f"{f[0].__name__}-{f[3]}" for f in SERVE_FAULTS],
)
def test_fault_in_the_serve_config_is_found(
    base: dict[str, Any], check: Callable[..., Any], old: str, new: list[str], said: str
) -> None:
    doc = copy.deepcopy(base)
    lines = doc["spec"]["serveConfigV2"].splitlines()
    index = [line.strip() for line in lines].index(old)
    indent = lines[index][: -len(old)]
    lines[index : index + 1] = [indent + line for line in new]
    doc["spec"]["serveConfigV2"] = "\n".join(lines)
    problems = list(check(doc))
    assert any(said in problem for problem in problems), problems


def test_gpu_faults_are_found() -> None:
    doc = rayservice(render(K8S / "gpu"))
    apply_operation(doc, "remove", f"{WORKERS}/template/spec/tolerations")
    apply_operation(doc, "remove", f"{WORKER}/resources/limits/nvidia.com~1gpu")
    problems = list(checks.sizing(doc))
    assert [problem.partition(":")[0] for problem in problems] == ["worker GPUs", "tolerations"]


def test_core_kinds_are_checked_strictly() -> None:
    (policy,) = load(K8S / "base" / "networkpolicy.yaml")
    policy["spec"]["ingres"] = []
    assert list(checks.schema(policy)) != []


@pytest.mark.parametrize(
    ("operation", "said"),
    [
        ({"op": "test", "path": "/a/0", "value": 2}, "does not fit"),
        ({"op": "replace", "path": "/b", "value": 2}, "no such place"),
        ({"op": "remove", "path": "/c"}, "no such place"),
        ({"op": "replace", "path": "/a/5", "value": 2}, "no such place"),
    ],
)
def test_patch_that_does_not_fit_is_an_error(operation: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        apply_operation({"a": [1]}, **operation)


@pytest.mark.parametrize(
    ("kustomization", "said"),
    [
        ({"resources": ["a.yaml"], "namePrefix": "x-"}, "namePrefix"),
        (
            {
                "resources": ["a.yaml"],
                "patches": [{"path": "p.yaml", "target": {"kind": "ConfigMap", "name": "b"}}],
            },
            "nothing is the ConfigMap/b",
        ),
    ],
)
def test_what_render_cannot_do_is_an_error(
    tmp_path: Path, kustomization: dict[str, Any], said: str
) -> None:
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}}
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(config_map), encoding="utf-8")
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization), encoding="utf-8")
    with pytest.raises(ValueError, match=said):
        render(tmp_path)
