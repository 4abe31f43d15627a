"""Reads the code blocks of the documents, and runs them.

A shell or Python block is run as it stands, unless the line before it says what it needs:

    <!-- needs: server -->        runs in tests/system, against a running cluster
    <!-- needs: GPU -->           not run: see NEEDS
"""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quire.replica.builtin_model import CHECKPOINT

ROOT = Path(__file__).parents[2]
PYTHON, SHELL, CONSOLE = ("python", "py"), ("bash", "sh", "shell", "console"), ("pycon",)
# What this test does not have. Each block that needs it says so.
NEEDS = {
    "server": "a running cluster",
    "GPU": "an NVIDIA GPU",
    "Kubernetes": "a Kubernetes cluster",
    "network": "downloads",
    "Ray": "a Ray cluster of several nodes",
    "minutes": "a command that takes minutes",
    "own replica": "a replica to kill: the command ends the oldest one on the machine, whoever started it",
}
_FENCE = re.compile(
    r"(?:^<!-- needs: (?P<needs>[^>]*?) -->\n\n?)?"
    r"^(?P<indent> *)```(?P<language>[\w-]*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a document. `line` is that of its first line of code."""

    path: Path
    line: int
    language: str
    needs: str
    text: str

    @property
    def runs(self) -> bool:
        """Whether its language is one that can be run."""
        return self.language in PYTHON + SHELL + CONSOLE

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


def documents() -> list[Path]:
    """The Markdown files of the repository."""
    tops = [path for path in ROOT.glob("*.md")]
    folders = ("cluster", "docs", "k8s", "kernels", "protos", "replica", "router", "tests/perf")
    return sorted(tops + [path for folder in folders for path in (ROOT / folder).rglob("*.md")])


def blocks(path: Path) -> list[Block]:
    """The fenced blocks of a document, in order."""
    text = path.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start("text")) + 1
        language, needs = match["language"].lower(), match["needs"] or ""
        found.append(Block(path, line, language, needs, match["text"]))
    return found


class Runner:
    """Runs the blocks of one document in order: its Python shares one namespace, its shell one folder.

    The folder has `my-model`, a checkpoint. `quire serve` checks its arguments here and starts nothing: its start is
    tested in tests/system.

    Parameters
    ----------
    ports
        Ports of the documents (8000, 9000) to those of the running cluster.
    """

    def __init__(self, folder: Path, ports: Mapping[int, int] | None = None):
        self._folder, self._ports = folder, ports or {}
        self._names: dict[str, object] = {"__name__": "__main__"}
        if not (folder / "my-model").exists():
            (folder / "my-model").symlink_to(CHECKPOINT)
        shims = folder / "bin"
        shims.mkdir(exist_ok=True)
        (shims / "quire").write_text(_QUIRE.format(python=sys.executable))
        (shims / "quire").chmod(0o755)
        path = os.pathsep.join([str(shims), str(Path(sys.executable).parent), os.environ["PATH"]])
        self._environment = {**os.environ, "PATH": path, "HOME": str(folder)}
        imports = (str(ROOT), os.environ.get("PYTHONPATH"))  # for `python -m tests.perf`
        self._environment["PYTHONPATH"] = os.pathsep.join(filter(None, imports))

    def run(self, block: Block) -> None:
        """Run a block.

        Raises
        ------
        AssertionError
            A command fails, or a console example prints something else. Python's own exceptions come through.
        """
        text = self._with_ports(block.text)
        if block.language in SHELL:
            self._run_shell(block, text)
        elif block.language in CONSOLE:
            self._run_console(block, text)
        else:
            exec(compile("\n" * (block.line - 1) + text, str(block), "exec"), self._names)

    def _with_ports(self, text: str) -> str:
        for documented, port in self._ports.items():
            text = re.sub(rf"\b((?:127\.0\.0\.1|localhost):){documented}\b", rf"\g<1>{port}", text)
        return text

    def _run_shell(self, block: Block, text: str) -> None:
        result = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=self._folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert result.returncode == 0, f"{block}\n{text}\n{result.stdout}\n{result.stderr}"

    def _run_console(self, block: Block, text: str) -> None:
        test = doctest.DocTestParser().get_doctest(
            text, self._names, str(block), str(block.path), block.line
        )
        printed: list[str] = []
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
        failed, _ = runner.run(test, out=printed.append, clear_globs=False)
        self._names.update(test.globs)
        assert not failed, "".join(printed)


_QUIRE = """\
#!/bin/bash
if [[ "$1" == serve && "$2" == *.yaml ]]; then
  set -- config check "$2"
elif [[ "$1" == serve ]]; then
  set -- config show "${{@:2}}"
fi
exec "{python}" -m quire.cluster.cli "$@"
"""
