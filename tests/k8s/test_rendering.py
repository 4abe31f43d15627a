"""The renderer of these tests refuses what it cannot do as kustomize does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from .manifests import apply_operation, render


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
        ({"kind": "Kustomization", "resources": ["a.yaml"], "namePrefix": "x-"}, "namePrefix"),
        (
            {
                "kind": "Kustomization",
                "resources": ["a.yaml"],
                "patches": [{"path": "p.yaml", "target": {"kind": "ConfigMap", "name": "b"}}],
            },
            "0 objects are the ConfigMap/b",
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


def test_a_component_that_replaces_otherwise_is_an_error(tmp_path: Path) -> None:
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}}
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(config_map), encoding="utf-8")
    kustomization = {
        "kind": "Kustomization",
        "resources": ["a.yaml"],
        "replacements": [{"targets": [{"options": {"create": True}}]}],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization), encoding="utf-8")
    with pytest.raises(ValueError, match="of whole fields"):
        render(tmp_path)
