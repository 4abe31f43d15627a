"""Every relative link of the documents leads to a file, and to a heading of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.documents import ROOT, documents

_LINK = re.compile(r"\[[^\]]+\]\((?!https?:|mailto:)([^)\s]+)\)")
_CODE = re.compile(r"^ *```.*?^ *```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def headings(text: str) -> set[str]:
    """Anchors of a Markdown file, as repository pages and mkdocs make them."""
    found = re.findall(
        r"^#+ +(.*)$", re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S), re.M
    )
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in found}


def broken(path: Path, text: str) -> list[str]:
    found = []
    for target in _LINK.findall(_CODE.sub("", text)):
        name, _, anchor = target.partition("#")
        file = (path.parent / name) if name else path
        if not file.exists():
            found.append(target)
        elif anchor and file.suffix == ".md" and anchor not in headings(file.read_text("utf-8")):
            found.append(target)
    return found


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path):
    assert broken(path, path.read_text(encoding="utf-8")) == []


def test_a_broken_link_is_found():
    text = "[a](docs/metrics.md) [b](docs/metrics.md#labels) [c](docs/none.md) [d](README.md#none)"
    assert broken(ROOT / "README.md", text) == ["docs/none.md", "README.md#none"]
