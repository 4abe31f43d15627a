"""Every shell and Python block of the documents runs, or says what it needs that this test does not have."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from quire.cluster.config.app_config import AppConfig
from quire.cluster.config.live_update import problems
from quire.cluster.config.serve_config import check
from tests.docs.documents import NEEDS, ROOT, Block, Runner, blocks, documents

DOCUMENTS = documents()


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def here(path: Path) -> list[Block]:
    """The blocks of a document that need nothing but this process."""
    return [block for block in blocks(path) if block.runs and not block.needs]


@pytest.fixture(scope="module", autouse=True)
def interpreter() -> None:
    """The kernels' example runs in Triton's interpreter, as the kernels' own tests do."""
    if "TRITON_INTERPRET" in os.environ:
        from tests.kernels.compile.interpreter import repair_interpreter

        repair_interpreter()


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if here(path)], ids=name)
def test_the_blocks_of_a_document_run(path: Path, tmp_path: Path):
    runner = Runner(tmp_path)
    for block in here(path):
        runner.run(block)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_a_block_that_is_not_run_says_what_it_needs(path: Path):
    for block in blocks(path):
        if block.needs:
            assert block.runs, f"{block}: a block of {block.language!r} is never run"
            assert set(block.needs.split(", ")) <= set(NEEDS), f"{block}: {block.needs}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_configuration_in_documents_is_valid(path: Path):
    """YAML is a Serve config, its `args`, its `deployments`, or something else that can be read."""
    for block in blocks(path):
        if block.language == "json":
            json.loads(block.text)
        if block.language != "yaml":
            continue
        content: Any = yaml.safe_load(block.text)
        if "applications" in content:
            check(content)
        if "args" in content:
            AppConfig.from_args(content["args"])
        for deployment in content.get("deployments", ()):
            assert not problems(AppConfig(), deployment, str(block))


def test_the_test_command_stands_in_the_readme():
    """Continuous integration takes it from there: the only command for tests in a shell block."""
    lines = [
        line
        for block in blocks(ROOT / "README.md")
        if block.language == "bash"
        for line in block.text.splitlines()
    ]
    assert [line.split("#")[0].strip() for line in lines if "test" in line.split("#")[0]] == [
        "make test"
    ]


@pytest.mark.parametrize(
    ("language", "text"),
    [("bash", "false | true"), ("python", "1 / 0"), ("pycon", ">>> 1 + 1\n3\n")],
)
def test_a_block_that_fails_is_found(language: str, text: str, tmp_path: Path):
    block = Block(ROOT / "README.md", 1, language, "", text)
    with pytest.raises((AssertionError, ZeroDivisionError)):
        Runner(tmp_path).run(block)


def test_blocks_are_read_with_what_they_need(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("# A\n\n<!-- needs: GPU -->\n```bash\nx\n```\n\n```python\ny\nz\n```\n")
    found = [(block.line, block.language, block.needs, block.text) for block in blocks(page)]
    assert found == [(5, "bash", "GPU", "x\n"), (9, "python", "", "y\nz\n")]
