"""Links and file names of the documents: every link leads to a file and a heading of it, every named file exists."""

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


_FILE = re.compile(r"`(?:quire/)?([\w./-]+\.(?:py|c|h|proto|yaml|md))`")
FILES = [f"/{path.relative_to(ROOT).as_posix()}" for path in ROOT.glob("[a-zA-Z]*/**/*")]
FILES += [f"/{path.name}" for path in ROOT.glob("*.*")]
# What commands write, and a pattern.
NOT_OURS = {"my.yaml", "check_CLIENT.py"}


def unknown_files(text: str) -> list[str]:
    """File names in code spans that no file of the repository ends with."""
    names = set(_FILE.findall(re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S)))
    found = names - NOT_OURS
    return sorted(n for n in found if not any(file.endswith(f"/{n}") for file in FILES))


@pytest.mark.parametrize(
    "path",
    [path for path in documents() if "lab" not in path.parts and path.name != "CHANGELOG.md"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_the_files_that_are_named_exist(path: Path):
    """Also without their folder, as a folder's README names them. The laboratory tells of the past."""
    assert unknown_files(path.read_text(encoding="utf-8")) == []


def test_a_file_that_does_not_exist_is_found():
    text = "`policy/cost.py`, `order.py`, `no_such_module.py`"
    assert unknown_files(text) == ["no_such_module.py"]


CLASSES = {
    name
    for folder in ("cluster", "kernels", "protos", "replica", "router")
    for path in (ROOT / folder).rglob("*.py")
    for name in re.findall(r"^class (\w+)", path.read_text("utf-8"), re.MULTILINE)
}


@pytest.mark.parametrize("folder", ["cluster", "kernels", "replica", "router"])
def test_the_owners_of_a_folder_are_classes(folder: str):
    _, _, table = (ROOT / folder / "README.md").read_text("utf-8").partition("## Ownership")
    owners = {
        name
        for row in re.findall(r"^\| ([^|]*) \|", table, re.MULTILINE)
        for name in re.findall(r"`([A-Z]\w+)`", row)
    }
    assert owners and owners <= CLASSES, owners - CLASSES
