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
from . import overlay_checks
from .manifests import (
    K8S,
    REMOVE,
    ROOT,
    apply_operation,
    flatten,
    groups,
    load,
    ray_container,
    rayservice,
    render,
    seed_fault,
)

# What the README offers: a folder, and components on top of it.
OVERLAYS = {
    "base": (),
    "gpu": (),
    "production": (),
    "base+ha": ("ha",),
    "base+auth": ("auth",),
    "base+tls": ("tls",),
    "base+autoscale": ("autoscale",),
    "base+upgrade": ("autoscale", "upgrade"),
    "gpu+upgrade": ("ha", "auth", "autoscale", "upgrade"),
}
HEAD = "/spec/rayClusterConfig/headGroupSpec"
WORKERS = "/spec/rayClusterConfig/workerGroupSpecs/0"
WORKER = f"{WORKERS}/template/spec/containers/0"

# What a pod needs beyond cluster.yaml, and nothing else.
IN_A_POD = {"http_options.host": "0.0.0.0", "grpc_options.enable_reflection": False}
GPU = {
    "model": "Qwen/Qwen3-8B",
    "revision": "b968826d9c46dd6066d109eabc6255188de91218",
    "device": "cuda",
}
DIFFERENCES = {
    "base": {"replica_resources.num_cpus": 1.5, "engine.num_threads": 2},
    "gpu": GPU,
    "production": GPU,
    "auth": {"auth.key_file": "/etc/quire/keys/keys.json"},
    "tls": {
        "tls.certificate_file": "/etc/quire/tls/tls.crt",
        "tls.key_file": "/etc/quire/tls/tls.key",
    },
    "autoscale": {"autoscaling.min_replicas": 2, "autoscaling.max_replicas": 8},
    "ha": {},
    "upgrade": {},
}


@pytest.fixture(scope="module", params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def docs(overlay: str) -> list[dict[str, Any]]:
    return render(K8S / overlay.partition("+")[0], *OVERLAYS[overlay])


# --------------------------------------------------------------------------------------------------
# The shipped files
# --------------------------------------------------------------------------------------------------


def test_every_document_fits_its_schema(docs: list[dict[str, Any]]) -> None:
    for doc in docs:
        assert list(checks.schema(doc)) == [], doc["kind"]


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_rayservice_passes(docs: list[dict[str, Any]], check: Callable[..., Any]) -> None:
    assert list(check(rayservice(docs))) == []


@pytest.mark.parametrize("check", overlay_checks.CHECKS, ids=lambda check: check.__name__)
def test_overlay_passes(docs: list[dict[str, Any]], check: Callable[..., Any]) -> None:
    assert list(check(docs)) == []


def test_production_is_pinned() -> None:
    assert list(overlay_checks.pinned(render(K8S / "production"))) == []


def test_every_folder_that_runs_quire_or_changes_it_is_tested() -> None:
    found = set()
    for path in K8S.glob("*/kustomization.yaml"):
        if path.parent.name == "observability":  # test_observability.py
            continue
        is_component = load(path)[0]["kind"] == "Component"
        if is_component or any(doc["kind"] == "RayService" for doc in render(path.parent)):
            found.add(path.parent.name)
    assert found == {name.partition("+")[0] for name in OVERLAYS} | set(sum(OVERLAYS.values(), ()))


def test_serve_config_is_cluster_yaml_in_a_pod(overlay: str, docs: list[dict[str, Any]]) -> None:
    ours = flatten(serve_config.parse_yaml((ROOT / "cluster.yaml").read_text(encoding="utf-8")))
    theirs = flatten(serve_config.parse_yaml(rayservice(docs)["spec"]["serveConfigV2"]))
    parts = [overlay.partition("+")[0], *OVERLAYS[overlay]]
    if overlay == "production":
        parts += ["auth", "tls", "autoscale"]
    allowed = IN_A_POD | {
        f"applications[0].args.{field}": value
        for part in parts
        for field, value in DIFFERENCES[part].items()
    }
    assert {path: theirs.get(path) for path in allowed} == allowed
    assert {path: v for path, v in theirs.items() if path not in allowed} == {
        path: v for path, v in ours.items() if path not in allowed
    }


def test_components_append_to_the_arguments_in_any_order() -> None:
    first = render(K8S / "base", "auth", "tls", "autoscale")
    second = render(K8S / "base", "autoscale", "tls", "auth")
    texts = [rayservice(docs)["spec"]["serveConfigV2"] for docs in (first, second)]
    assert serve_config.parse_yaml(texts[0]) == serve_config.parse_yaml(texts[1])


@pytest.mark.parametrize(
    "components", [("upgrade",), ("autoscale", "upgrade", "tls"), ("tls", "autoscale", "upgrade")]
)
def test_components_that_exclude_each_other_do_not_render(components: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"does not fit|no such place"):
        render(K8S / "base", *components)


def test_pods_of_the_monitors_exist() -> None:
    docs = render(K8S / "base")
    quire, ray = load(K8S / "observability" / "podmonitor.yaml")
    ports: dict[str, int] = {}
    for group in groups(rayservice(docs)):
        # KubeRay adds the second.
        kind = "worker" if "groupName" in group else "head"
        labels = group["template"]["metadata"]["labels"] | {"ray.io/node-type": kind}
        assert ray["spec"]["selector"]["matchLabels"].items() <= labels.items()
        # One answer is that of all processes: a second pod would add everything again.
        is_scraped = quire["spec"]["selector"]["matchLabels"].items() <= labels.items()
        assert is_scraped == (kind == "head")
        ports |= {p["name"]: p["containerPort"] for p in ray_container(group)["ports"]}
    (own,) = quire["spec"]["podMetricsEndpoints"]
    assert own["path"] == "/metrics" and ports[own["port"]] == 8000
    monitored = {ports[e["port"]] for e in (own, *ray["spec"]["podMetricsEndpoints"])}
    assert monitored == set(overlay_checks.MONITORED)


def test_constants_are_the_applications() -> None:
    text = (ROOT / "cluster" / "app.py").read_text(encoding="utf-8")
    assert f"REACHABLE_S, END_S = {checks.REACHABLE_S}, {checks.END_S}\n" in text


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kubectl_renders_the_same(overlay: str, docs: list[dict[str, Any]], tmp_path: Path) -> None:
    shutil.copytree(K8S, tmp_path / "k8s")
    folder = tmp_path / "k8s" / overlay.partition("+")[0]
    if components := OVERLAYS[overlay]:
        folder = tmp_path / "k8s" / "own"
        folder.mkdir()
        own = {
            "resources": [f"../{overlay.partition('+')[0]}"],
            "components": [f"../{name}" for name in components],
        }
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(own), encoding="utf-8")
    command = ["kubectl", "kustomize", str(folder)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout

    def key(doc: dict[str, Any]) -> tuple[str, str]:
        return doc["kind"], doc["metadata"]["name"]

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
    (checks.operator, "/spec/upgradeStrategy", {"type": "Rolling"}, "unknown, got 'Rolling'"),
    (
        checks.operator,
        "/spec/upgradeStrategy",
        {"type": "NewClusterWithIncrementalUpgrade"},
        "needs enableInTreeAutoscaling",
    ),
    (checks.operator, "/spec/rayClusterConfig/autoscalerOptions", {"version": "v2"}, "do nothing"),
    (
        checks.operator,
        "/spec/rayClusterConfig/gcsFaultToleranceOptions",
        {"redisAddress": "redis:6379"},
        "must be rocksdb",
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
    (checks.safety, f"{WORKER}/env/2", {"name": "HF_TOKEN", "value": "hf_x"}, "secretKeyRef"),
    (checks.safety, f"{WORKER}/env/2", {"name": "HF_TOKEN", "value": "hf_x"}, "only the container"),
    (checks.safety, f"{WORKER}/env/2", REMOVE, "HF_HUB_OFFLINE: must be '1'"),
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
    (checks.traffic, f"{WORKER}/lifecycle", REMOVE, "preStop must be"),
    (checks.traffic, f"{WORKER}/lifecycle/preStop/exec/command/0", "ray", "preStop must be"),
    (checks.traffic, f"{WORKER}/lifecycle/preStop/exec/command/2", "--wait-s", "does not know"),
    (checks.traffic, f"{WORKER}/lifecycle/preStop/exec/command/3", "120", "got 120"),
    (checks.traffic, f"{WORKERS}/template/spec/terminationGracePeriodSeconds", REMOVE, "got 30"),
    (checks.traffic, "/spec/rayClusterDeletionDelaySeconds", REMOVE, "at least 600"),
    (checks.sizing, f"{HEAD}/rayStartParams/num-cpus", REMOVE, "num-cpus must be '0'"),
    (checks.sizing, "/spec/rayClusterConfig/rayVersion", "2.59.0", "must be the image's"),
    (checks.sizing, f"{WORKER}/resources/limits/memory", REMOVE, "limits.memory: missing"),
    (checks.sizing, f"{WORKER}/resources/limits/memory", "8Gi", "must be equal"),
    (checks.sizing, f"{WORKERS}/rayStartParams/object-store-memory", "1073741824", "must fit"),
    (checks.sizing, f"{WORKERS}/maxReplicas", 3, "must have {'replicas': 2"),
    (checks.sizing, f"{WORKER}/resources/requests/ephemeral-storage", REMOVE, "missing"),
    (
        checks.sizing,
        f"{WORKER}/resources/limits/ephemeral-storage",
        "20Gi",
        "must hold the volumes",
    ),
    (checks.sizing, f"{WORKERS}/template/spec/volumes/0/emptyDir", {}, "sizeLimit is missing"),
    (
        checks.sizing,
        f"{WORKER}/env/5",
        {"name": "RAY_ROTATION_BACKUP_COUNT", "value": "5"},
        "256Mi",
    ),
    (
        checks.sizing,
        "/spec/rayClusterConfig/enableInTreeAutoscaling",
        True,
        "the section autoscaling",
    ),
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
    (checks.traffic, "replicas: 2", ["router: {drain_timeout_s: 60.0}"], "95.0 s for routers"),
    (checks.sizing, "num_cpus: 1.5", ["num_cpus: 1.0"], "must not fit"),
    (checks.sizing, "num_threads: 2", ["num_threads: 4"], "num_threads"),
    (checks.sizing, "replicas: 2", ["replicas: 4"], "must have {'replicas': 4"),
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
    seed_fault(doc, path, value)
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
    for side in ("requests", "limits"):
        apply_operation(doc, "replace", f"{WORKER}/resources/{side}/memory", "20Gi")
    problems = list(checks.sizing(doc))
    found = [problem.partition(":")[0] for problem in problems]
    assert found == ["worker GPUs", "tolerations", "memory"]
