"""Every path that code and documents name exists."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAMED = re.compile(
    r"(?<![\w./-])(?:quire/)?"
    r"((?:cluster|kernels|protos|replica|router|tests|docs|k8s|bench)/[\w./-]+\.(?:py|md|yaml|c|h|proto))\b"
)
SUFFIXES = (".py", ".md", ".yaml", ".c", ".h", ".proto")


def sources() -> list[Path]:
    """All documents, and code outside of tests/ (test data may look like paths)."""
    if (ROOT / ".git").exists():
        command = ["git", "-C", str(ROOT), "ls-files"]
        names = subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout.splitlines()
    else:
        names = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("[a-z]*/**/*")]
    return [
        Path(name)
        for name in names
        if name.endswith(SUFFIXES) and (name.endswith(".md") or not name.startswith("tests/"))
    ]


def missing(text: str) -> list[str]:
    return [match[0] for match in NAMED.finditer(text) if not (ROOT / match[1]).exists()]


def test_every_path_that_is_named_exists():
    found = {str(path): missing((ROOT / path).read_text()) for path in sources()}
    assert {path: names for path, names in found.items() if names} == {}


TEST = re.compile(r"`(tests/[\w./]+\.py)::(\w+)")


def missing_tests(text: str) -> list[str]:
    """Tests that a text names as `tests/FILE.py::NAME` and that do not exist."""
    return [
        f"{path}::{name}"
        for path, name in TEST.findall(text)
        if not re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE)
    ]


def test_every_test_that_a_document_names_exists():
    documents = [path for path in sources() if path.suffix == ".md"]
    assert {
        path: found for path in documents if (found := missing_tests((ROOT / path).read_text()))
    } == {}
    security = (ROOT / "docs/security.md").read_text()
    rows = security.partition("## Known kinds of attack")[2].splitlines()[6:]
    assert len(rows) > 20 and all(TEST.search(row) for row in rows)
    assert missing_tests("`tests/test_named_paths.py::test_nothing`") != []


def test_a_path_that_does_not_exist_is_found():
    assert missing("see `router/no_such_file.py`, `quire/replica/engine.py`") == [
        "router/no_such_file.py"
    ]
