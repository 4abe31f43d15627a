"""Rehearse `make gpu-1`, `gpu-2` and `gpu-3` without a GPU, under the GPU machine's conditions (no network, no git).

    make gpu-rehearse                                        # in an environment with the GPU machine's libraries

```
 tracked files ──copy──▶ a new folder without .git ──▶ import kernels/ and replica/
                                                   ──▶ collect the tests that `make gpu` selects from
                                                   ──▶ make gpu-1, gpu-2, gpu-3 with GPU_REHEARSE=1 and no network
                                                   ──▶ each ended with 0 and wrote its results
```
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from quire.cluster.bench.results import report
from tests.perf.gpu.gpu_carry import CACHE
from tests.perf.gpu.gpu_plan import PLANS, TEST_FOLDERS

REQUIREMENTS = Path(__file__).with_name("gpu_requirements.txt")
MAX_FILES = 8  # that a command may write
PACKAGES = ("kernels", "replica")
# No process listens on this port.
_NO_NETWORK = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "all_proxy")}
_KEPT = ("PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH")
_IMPORT = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        library = error.name.partition(".")[0]
        if library not in ("ray", "llguidance"):
            raise SystemExit(f"{name}: {error}")
        print(f"{name} needs {library}")
"""


class RehearsalError(Exception):
    """A command failed, or its results are incomplete."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of the tracked files, in which commands run."""

    root: Path
    out: Path
    python: str
    environment: Mapping[str, str]

    def make(self, target: str, **variables: object) -> subprocess.CompletedProcess[str]:
        """Run a make target in the copy without a network."""
        settings = {"GPU_REHEARSE": 1, "GPU_PYTHON": self.python, "GPU_OUT": self.out, **variables}
        command = ["make", "--no-print-directory", target]
        command += [f"{name}={value}" for name, value in settings.items()]
        return self._run(command, {})

    def import_all(self) -> str:
        """Import every module of `PACKAGES`; returns a line for each module that needs a missing library."""
        names = [
            ".".join(("quire", *path.relative_to(self.root).with_suffix("").parts))
            for package in PACKAGES
            for path in sorted((self.root / package).rglob("*.py"))
            if path.name != "__init__.py"
        ]
        done = self._run_python("-c", _IMPORT, *names)
        if done.returncode:
            raise RehearsalError(f"imports: {done.stdout}{done.stderr}")
        return done.stdout

    def collect_tests(self) -> str:
        """Collect the tests that `make gpu` selects from; returns pytest's last line."""
        done = self._run_python(
            *("-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"),
            *("-m", "not soak", "--device", "cpu", *TEST_FOLDERS),
        )
        if done.returncode:
            raise RehearsalError(f"tests: {done.stdout[-3000:]}{done.stderr}")
        return done.stdout.splitlines()[-1]

    def _run_python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run Python with `quire` on its path."""
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "quire").symlink_to(self.root)
            path = os.pathsep.join(filter(None, (folder, self.environment.get("PYTHONPATH"))))
            more = {"PYTHONPATH": path, "TRITON_INTERPRET": "1"}
            return self._run([self.python, *arguments], more)

    def _run(self, command: list[str], more: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*_without_network(), *command],
            cwd=self.root,
            env={**self.environment, **more},
            capture_output=True,
            text=True,
        )

    def check(self, number: int, done: subprocess.CompletedProcess[str]) -> dict[str, dict]:
        """Check the results of a finished command, and return them.

        Raises
        ------
        RehearsalError
            The command failed, a result is missing, or a result is not from a rehearsal of this commit.
        """
        if done.returncode:
            raise RehearsalError(f"gpu-{number}: {done.stdout}{done.stderr}")
        wanted = {step.result for step in PLANS[number]}
        found = {path.name for path in self.out.iterdir()}
        missing = wanted | {f"gpu-{number}.log", CACHE}
        missing -= found
        if missing or len(found) > MAX_FILES:
            raise RehearsalError(
                f"gpu-{number}: lacks {sorted(missing)} among {len(found)} files, at most {MAX_FILES}"
            )
        results = {name: json.loads((self.out / name).read_text()) for name in wanted}
        for name, result in results.items():
            facts = (result["rehearsal"], result["commit"])
            if facts != (True, self.environment[report.COMMIT_VARIABLE]):
                raise RehearsalError(f"gpu-{number}: {name} says (rehearsal, commit) = {facts}")
        return results


def copy_tracked(
    folder: Path, python: str = sys.executable, environment: Mapping[str, str] | None = None
) -> Copy:
    """Copy the tracked files into `folder`, as they are in the working tree.

    Parameters
    ----------
    environment
        More environment variables of the commands; some come from this process.
    """
    root, out = folder / "tree", folder / "out"
    listed = subprocess.run(
        ["git", "-C", str(report.ROOT), "ls-files", "-z"], capture_output=True, check=True
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        source, target = report.ROOT / name, root / name
        if source.is_file():  # git still lists deleted files
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    variables = {name: os.environ[name] for name in _KEPT if name in os.environ}
    variables |= _NO_NETWORK | {"HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    variables |= {report.COMMIT_VARIABLE: report.commit(), **(environment or {})}
    return Copy(root, out, python, variables)


def _without_network() -> list[str]:
    """Prefix of commands that gives them an empty network namespace, if the system allows it."""
    prefix = ["unshare", "--map-root-user", "--net"]
    try:
        works = subprocess.run([*prefix, "true"], capture_output=True).returncode == 0
    except OSError:
        return []
    return prefix if works else []


def wrong_versions() -> list[str]:
    """Libraries that are missing in this environment or have other versions."""
    found = []
    for line in REQUIREMENTS.read_text().splitlines():
        name, _, version = line.partition("#")[0].strip().partition("==")
        if not name:
            continue
        try:
            installed = metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            found.append(f"{name} is missing")
            continue
        if version and installed != version:
            found.append(f"{name} is {installed}, not {version}")
    return found


def _problems() -> Iterable[str]:
    import torch

    if sys.version_info[:2] != (3, 12):
        yield f"Python is {sys.version.split()[0]}, not 3.12"
    yield from wrong_versions()
    if torch.version.cuda is None:
        yield f"torch {torch.__version__} is not a CUDA build"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status: 1 if the environment differs or a command fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--commands", nargs="+", type=int, choices=PLANS, default=list(PLANS))
    options = parser.parse_args(arguments)
    problems = list(_problems())
    print(*problems, sep="\n", file=sys.stderr)
    if problems:
        return 1
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_tracked(Path(folder))
        print("network:", "none" if _without_network() else "a proxy that does not answer")
        try:
            began_s = time.monotonic()
            print(copy.import_all(), end="")
            print(copy.collect_tests())
            print(f"imports and tests: {time.monotonic() - began_s:.0f} s", flush=True)
            for number in options.commands:
                began_s = time.monotonic()
                copy.check(number, done := copy.make(f"gpu-{number}"))
                print(*done.stdout.splitlines()[-len(PLANS[number]) :], sep="\n")
                print(f"gpu-{number}: {time.monotonic() - began_s:.0f} s", flush=True)
                shutil.rmtree(copy.out)
        except RehearsalError as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
