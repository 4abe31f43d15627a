"""Reading the manifests of k8s/: YAML, the part of kustomize that they use, paths into them."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

REMOVE = object()
ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"

_KNOWN_KEYS = {
    "apiVersion", "kind", "resources", "components", "patches", "replacements", "namespace", "images",
    "configMapGenerator",
}  # fmt: skip
_CLUSTER_SCOPED = {"Namespace", "PriorityClass"}
_LOCAL = "config.kubernetes.io/local-config"
_UNITS = {"": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def load(path: Path) -> list[dict[str, Any]]:
    """All documents of a YAML file.

    PyYAML gives one object for an anchor and its aliases; Kubernetes' tools copy, so that a patch changes
    one place only, and so does the detour over JSON.
    """
    docs = yaml.safe_load_all(path.read_text(encoding="utf-8"))
    return [json.loads(json.dumps(doc)) for doc in docs if doc]


def render(folder: Path, *components: str) -> list[dict[str, Any]]:
    """What `kubectl kustomize` prints for a folder, or for an overlay of it with components of k8s/.

    Implements the parts of kustomize that the manifests use. A test compares the results.

    Raises
    ------
    ValueError
        If the kustomization uses anything else, a patch has no target or a patch does not fit.
    """
    docs: list[dict[str, Any]] = []
    _accumulate(folder, docs)
    for component in components:
        _accumulate(K8S / component, docs)
    return [doc for doc in docs if _LOCAL not in doc["metadata"].get("annotations", {})]


def _accumulate(folder: Path, docs: list[dict[str, Any]]) -> None:
    """Add a kustomization's resources to `docs` and change `docs` as it says, in kustomize's order."""
    spec = load(folder / "kustomization.yaml")[0]
    if unknown := spec.keys() - _KNOWN_KEYS:
        raise ValueError(f"{folder}: kustomization keys {sorted(unknown)} are not rendered here")
    # The changes of a Component apply to everything so far, those of a Kustomization to its own resources.
    own = docs if spec["kind"] == "Component" else []
    for name in spec.get("resources", ()):
        path = folder / name
        if path.is_dir():
            _accumulate(path, own)
        else:
            own += load(path)
    for name in spec.get("components", ()):
        _accumulate(folder / name, own)
    for entry in spec.get("configMapGenerator", ()):
        metadata = {"name": entry["name"], "labels": entry["options"]["labels"]}
        data = {name: (folder / name).read_text(encoding="utf-8") for name in entry["files"]}
        own.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
    for entry in spec.get("patches", ()):
        target = _target(own, entry["target"], folder)
        for operation in yaml.safe_load((folder / entry["path"]).read_text(encoding="utf-8")):
            apply_operation(target, **operation)
    for doc in own:
        if "namespace" in spec and doc["kind"] not in _CLUSTER_SCOPED:
            doc["metadata"]["namespace"] = spec["namespace"]
        _set_images(doc, spec.get("images", ()))
    for entry in spec.get("replacements", ()):
        _replace(own, entry, folder)
    if own is not docs:
        docs += own


def _target(docs: list[dict[str, Any]], selector: dict[str, Any], folder: Path) -> dict[str, Any]:
    kind, name = selector["kind"], selector["name"]
    targets = [d for d in docs if (d["kind"], d["metadata"]["name"]) == (kind, name)]
    if len(targets) != 1:
        raise ValueError(f"{folder}: {len(targets)} objects are the {kind}/{name} to change, not 1")
    return targets[0]


def _set_images(value: Any, images: Sequence[dict[str, str]]) -> None:
    """Give the images of containers, wherever they are, another name and a digest."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        if key in {"containers", "initContainers"}:
            for container in item:
                for image in images:
                    if container["image"].partition(":")[0] == image["name"]:
                        container["image"] = f"{image['newName']}@{image['digest']}"
        if isinstance(item, dict | list):
            _set_images(item, images)


def _replace(docs: list[dict[str, Any]], entry: dict[str, Any], folder: Path) -> None:
    """A ConfigMap's text becomes a part of some fields: one between delimiters, or behind the last delimiter."""
    (target,) = entry["targets"]
    if target["options"].keys() != {"delimiter", "index"}:
        raise ValueError(f"{folder}: replacements of whole fields are not rendered here")
    _, key = entry["source"]["fieldPath"].split(".")
    text = _target(docs, entry["source"], folder)["data"][key]
    delimiter, index = target["options"]["delimiter"], target["options"]["index"]
    (path,) = target["fieldPaths"]
    *parents, field = path.split(".")
    found: list[Any] = [_target(docs, target["select"], folder)]
    for part in parents:
        found = [inner for one in found for inner in (one if part == "*" else [one[part]])]
    for one in found:
        parts = one[field].split(delimiter)
        # An index behind the last part appends.
        parts[index : index + 1] = [text]
        one[field] = delimiter.join(parts)


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


def seed_fault(doc: dict[str, Any], path: str, value: Any) -> None:
    """Set the place at a JSON pointer to `value`, add to a list (`/-`), or remove it (`REMOVE`)."""
    if value is REMOVE:
        apply_operation(doc, "remove", path)
    elif path.endswith("/-"):
        apply_operation(doc, "add", path, value)
    else:
        # In JSON 6902 `add` to a list inserts, so that an index needs `replace`.
        apply_operation(doc, "replace" if path[-1].isdigit() else "add", path, value)


def rayservice(docs: list[dict[str, Any]]) -> dict[str, Any]:
    """The one RayService among `docs`."""
    (doc,) = (d for d in docs if d["kind"] == "RayService")
    return doc


def groups(doc: dict[str, Any]) -> list[dict[str, Any]]:
    """The head group and the worker groups of a RayService, in this order."""
    cluster = doc["spec"]["rayClusterConfig"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def containers(group: dict[str, Any]) -> list[dict[str, Any]]:
    """All containers of a group's pod, those that run first included."""
    return [*pod(group).get("initContainers", ()), *pod(group)["containers"]]


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


def lock(name: str) -> dict[str, tuple[str, list[str]]]:
    """The version and the SHA-256 hashes of each package in a lock file of k8s/."""
    text = (K8S / name).read_text(encoding="utf-8").replace("\\\n", "")
    pins = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            pin, *hashes = line.split()
            package, _, version = pin.partition("==")
            pins[package] = version, [h.removeprefix("--hash=sha256:") for h in hashes]
    return pins
