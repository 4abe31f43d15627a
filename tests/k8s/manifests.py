"""Reading the manifests of k8s/: YAML, the part of kustomize that they use, paths into them."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"

_KNOWN_KEYS = {"apiVersion", "kind", "resources", "patches"}
_UNITS = {"": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def load(path: Path) -> list[dict[str, Any]]:
    """All documents of a YAML file.

    PyYAML gives one object for an anchor and its aliases; Kubernetes' tools copy, so that a patch changes
    one place only, and so does the detour over JSON.
    """
    docs = yaml.safe_load_all(path.read_text(encoding="utf-8"))
    return [json.loads(json.dumps(doc)) for doc in docs if doc]


def render(folder: Path) -> list[dict[str, Any]]:
    """What `kubectl kustomize folder` prints, for resources and JSON 6902 patches only.

    Raises
    ------
    ValueError
        If the kustomization uses anything else, a patch has no target or a patch does not fit.
    """
    spec = load(folder / "kustomization.yaml")[0]
    if unknown := spec.keys() - _KNOWN_KEYS:
        raise ValueError(f"{folder}: kustomization keys {sorted(unknown)} are not rendered here")
    docs: list[dict[str, Any]] = []
    for name in spec["resources"]:
        path = folder / name
        docs += render(path) if path.is_dir() else load(path)
    for entry in spec.get("patches", ()):
        kind, name = entry["target"]["kind"], entry["target"]["name"]
        targets = [d for d in docs if (d["kind"], d["metadata"]["name"]) == (kind, name)]
        if not targets:
            raise ValueError(f"{folder}: nothing is the {kind}/{name} that {entry['path']} patches")
        operations = yaml.safe_load((folder / entry["path"]).read_text(encoding="utf-8"))
        for target in targets:
            for operation in operations:
                apply_operation(target, **operation)
    return docs


def apply_operation(doc: Any, op: str, path: str, value: Any = None) -> None:
    """Apply one JSON 6902 operation (add, replace, remove, test) in place.

    Raises
    ------
    ValueError
        If the path does not exist, or a test finds another value.
    """
    *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in path.split("/")[1:]]
    try:
        for part in parents:
            doc = doc[int(part) if isinstance(doc, list) else part]
        if isinstance(doc, list) and op == "add":
            doc.insert(len(doc) if last == "-" else int(last), copy.deepcopy(value))
            return
        key = int(last) if isinstance(doc, list) else last
        if op != "add":
            doc[key]  # must exist
        if op in {"add", "replace"}:
            doc[key] = copy.deepcopy(value)
        elif op == "remove":
            del doc[key]
        elif op != "test" or doc[key] != value:
            raise ValueError(f"{op} {path}: does not fit")
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{op} {path}: no such place ({error!r})") from None


def rayservice(docs: list[dict[str, Any]]) -> dict[str, Any]:
    """The one RayService among `docs`."""
    (doc,) = (d for d in docs if d["kind"] == "RayService")
    return doc


def groups(doc: dict[str, Any]) -> list[dict[str, Any]]:
    """The head group and the worker groups of a RayService, in this order."""
    cluster = doc["spec"]["rayClusterConfig"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def pod(group: dict[str, Any]) -> dict[str, Any]:
    """The pod spec of a group."""
    return group["template"]["spec"]


def ray_container(group: dict[str, Any]) -> dict[str, Any]:
    """The container in which KubeRay starts Ray: always the first one."""
    return pod(group)["containers"][0]


def quantity(text: str | int) -> float:
    """A Kubernetes quantity (`500m`, `6Gi`) as a number: CPUs, bytes or a count."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z]*)", str(text))
    if not match or match[2] not in _UNITS:
        raise ValueError(f"not a quantity: {text!r}")
    return float(match[1]) * _UNITS[match[2]]


def flatten(value: Any, path: str = "") -> dict[str, Any]:
    """The leaves of nested mappings and lists by path (`a.b[0].c`)."""
    if isinstance(value, dict) and value:
        items = [(f"{path}.{key}" if path else str(key), item) for key, item in value.items()]
    elif isinstance(value, list) and value:
        items = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    else:
        return {path: value}
    return {leaf: v for inner, item in items for leaf, v in flatten(item, inner).items()}


def dockerfile(text: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile as (NAME, arguments), comments and line breaks removed."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    pairs = (line.partition(" ") for line in joined.splitlines() if line.strip())
    return [(name.upper(), arguments.strip()) for name, _, arguments in pairs]


def dockerfile_args(instructions: list[tuple[str, str]]) -> dict[str, str]:
    """The build arguments with their defaults."""
    return dict(a.partition("=")[::2] for name, a in instructions if name == "ARG")
