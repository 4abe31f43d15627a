"""The parts of `make test` together run every test."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
MARK = re.compile(r"^\s*(?:@|pytestmark = |)pytest\.mark\.(?:system|chaos)\b", re.MULTILINE)


def clusters() -> list[Path]:
    """The files and folders in which `make test-clusters` looks for tests."""
    makefile = (ROOT / "Makefile").read_text()
    names = re.search(r"^CLUSTERS := (.+)$", makefile, re.MULTILINE)[1].split()
    return [ROOT / name for name in [*names, "tests/chaos"]]


def test_every_module_that_test_units_leaves_to_test_clusters_is_among_its_paths():
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if MARK.search(path.read_text())]
    assert len(marked) > 20
    assert [p for p in marked if not any(p.is_relative_to(path) for path in clusters())] == []


def test_its_paths_exist():
    assert [path for path in clusters() if not path.exists()] == []
