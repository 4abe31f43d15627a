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


def test_a_path_that_does_not_exist_is_found():
    assert missing("see `router/no_such_file.py`, `quire/replica/engine.py`") == [
        "router/no_such_file.py"
    ]
