"""The hook of `make docs` turns links out of docs/ into paths."""

from __future__ import annotations

import runpy
from types import SimpleNamespace

import pytest

from tests.docs.documents import ROOT

HOOK = runpy.run_path(str(ROOT / "docs" / "site" / "outside_links.py"))["on_page_markdown"]


@pytest.mark.parametrize(
    ("page", "text", "expected"),
    [
        ("a.md", "[its README](../router/README.md)", "its README (`router/README.md`)"),
        ("a.md", "[`cluster.yaml`](../cluster.yaml)", "`cluster.yaml`"),
        ("a.md", "[b](metrics.md#labels)", "[b](metrics.md#labels)"),
        ("lab/a.md", "[b](../metrics.md)", "[b](../metrics.md)"),
        ("lab/a.md", "[b](../../Makefile#x) c", "b (`Makefile`) c"),
    ],
)
def test_links(page: str, text: str, expected: str):
    assert HOOK(text, page=SimpleNamespace(file=SimpleNamespace(src_uri=page))) == expected


def test_a_link_to_no_file_fails():
    page = SimpleNamespace(file=SimpleNamespace(src_uri="a.md"))
    with pytest.raises(FileNotFoundError, match=r"router/none\.md"):
        HOOK("[x](../router/none.md)", page=page)
