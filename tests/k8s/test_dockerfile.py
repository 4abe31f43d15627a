"""The Dockerfile cannot be built here; what can be known without a registry is checked."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

from .manifests import K8S, ROOT, dockerfile, dockerfile_args, groups, pod, rayservice, render

TEXT = (K8S / "Dockerfile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def hadolint(text: str) -> list[str]:
    """What hadolint says about a Dockerfile, one line for each thing."""
    program = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or "hadolint"
    command = [program, "--no-color", "-"]
    result = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
    assert not result.stderr, result.stderr
    return result.stdout.splitlines()


def copied(text: str) -> list[str]:
    """Paths in the repository that the build takes in."""
    sources = []
    for name, arguments in dockerfile(text):
        if name == "COPY" and "--from" not in arguments:
            sources += [word.rstrip("/") for word in arguments.split()[:-1]]
    return sources


def problems(text: str) -> Iterator[str]:
    """Rules beyond hadolint's."""
    instructions = dockerfile(text)
    bases = {arguments.partition(" ")[0] for name, arguments in instructions if name == "FROM"}
    if len(bases) != 1:
        yield f"FROM: all stages must have one base, got {sorted(bases)}"
    for base in bases:
        if not re.fullmatch(r"[a-z/]+:[\w.-]+@sha256:[0-9a-f]{64}", base):
            yield f"FROM: must name a tag and a digest, got {base!r}"
    users = [arguments for name, arguments in instructions if name == "USER"]
    if users != ["1000:1000"]:
        yield f"USER: must be 1000:1000, as in the manifests, got {users}"
    commands = [arguments for name, arguments in instructions if name in {"CMD", "ENTRYPOINT"}]
    if len(commands) != 1 or not commands[0].startswith("["):
        yield f"CMD: there must be one in exec form, got {commands}"
    for name, arguments in instructions:
        if name in {"ARG", "ENV"} and re.search(r"TOKEN|SECRET|PASSWORD|CREDENTIAL", arguments):
            yield f"{name} {arguments}: a secret would stay in the image's history"
    ignore = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    for source in copied(text):
        if not (ROOT / source).exists():
            yield f"COPY {source}: there is no such file"
        let_in = any(line.startswith("!") and fnmatch(source, line[1:]) for line in ignore)
        if not let_in:
            yield f"COPY {source}: .dockerignore keeps it out"
    folders = set(PROJECT["tool"]["setuptools"]["package-dir"].values())
    for folder in folders - set(copied(text)):
        yield f"COPY {folder}: a package is missing"
    for arguments in (a for name, a in instructions if name == "RUN" and "pip install" in a):
        for command in re.findall(r"pip install [^&]*", arguments):
            if not re.search(r"--require-hashes|--no-deps --no-index", command):
                yield f"RUN {command}: must check hashes, or install a local file alone"
    if dockerfile_args(instructions).get("LOCK") != "requirements.lock":
        yield "LOCK: must be requirements.lock by default"


def test_hadolint_passes() -> None:
    assert hadolint(TEXT) == []


def test_rules_pass() -> None:
    assert list(problems(TEXT)) == []


def test_ignores_all_but_what_is_copied() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert lines[0] == "*"
    assert {line[1:] for line in lines if line.startswith("!")} == set(copied(TEXT))


FAULTS = [
    ("COPY pyproject.toml", "ADD pyproject.toml", "DL3020"),
    ("WORKDIR /tmp", "WORKDIR tmp", "DL3000"),
    (" --no-cache-dir", "", "DL3042"),
    (" --no-install-recommends", "", "DL3015"),
    ("gcc=4:12.2.*", "gcc", "DL3008"),
    ("--require-hashes --requirement", "--requirement", "must check hashes"),
    ("--no-deps --no-index", "--no-deps", "must check hashes"),
    ("python:3.11.14-slim-bookworm@", "python@", "must name a tag and a digest"),
    ("@sha256:65a93d69", "@sha256:", "must name a tag and a digest"),
    ("\nUSER 1000:1000", "", "USER: must be"),
    ('CMD ["quire", "--help"]', "CMD quire --help", "exec form"),
    ("ARG PIP_EXTRA_INDEX_URL=", "ARG HF_TOKEN=", "history"),
    ("COPY cluster/ cluster/", "COPY clusters/ cluster/", "COPY clusters: there is no such file"),
    ("COPY cluster/ cluster/", "COPY tests/ cluster/", ".dockerignore keeps it out"),
    ("COPY router/ router/\n", "", "COPY router: a package is missing"),
    ("ARG LOCK=requirements.lock", "ARG LOCK=pyproject.toml", "LOCK: must be"),
]


@pytest.mark.parametrize(("old", "new", "said"), FAULTS, ids=[f[2] + f[0][:12] for f in FAULTS])
def test_fault_is_found(old: str, new: str, said: str) -> None:
    assert old in TEXT
    text = TEXT.replace(old, new)
    found = [*hadolint(text), *problems(text)]
    assert any(said in problem for problem in found), found


def test_user_is_the_manifests() -> None:
    ((user, group),) = (a.split(":") for name, a in dockerfile(TEXT) if name == "USER")
    for ray_group in groups(rayservice(render(K8S / "base"))):
        context = pod(ray_group)["securityContext"]
        assert (context["runAsUser"], context["runAsGroup"]) == (int(user), int(group))


def test_command_is_a_console_script_that_imports() -> None:
    (command,) = (json.loads(a) for name, a in dockerfile(TEXT) if name == "CMD")
    module, _, function = PROJECT["project"]["scripts"][command[0]].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_wheel_builds_from_what_is_copied(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    for source in copied(TEXT):
        target = tmp_path / "src" / source
        if (ROOT / source).is_dir():
            skip = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / source, target, ignore=skip)
        else:
            target.parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / source, target)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    command = [*pip, "--wheel-dir", str(tmp_path), str(tmp_path / "src")]
    # What is copied is the question here; tests/test_packaging.py compiles.
    environment = {**os.environ, "CC": "false"}
    subprocess.run(command, check=True, capture_output=True, timeout=120, env=environment)
    (wheel,) = tmp_path.glob("quire-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for package in PROJECT["tool"]["setuptools"]["packages"]:
        assert f"{package.replace('.', '/')}/__init__.py" in names
