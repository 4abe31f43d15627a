"""Executes a Dockerfile without a container runtime: each stage is a folder with Debian and Python, each RUN a chroot.

    FROM    a copy of the base: `debootstrap`, and the Python of this process as /usr/local (the image's has both)
    RUN     the very command, by the stage's shell, as root, in a mount namespace of its own
    COPY    from the repository, without what .dockerignore keeps out

It needs root, `debootstrap`, Debian's mirror and a package index. What it cannot show: the base image's own files (by
digest), and the size of layers.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .manifests import ROOT, dockerfile

# What the base image has in addition to Debian's minimal system: libraries of Python's modules.
BASE_PACKAGES = (
    "ca-certificates,netbase,tzdata,libssl3,libsqlite3-0,libffi8,zlib1g,libbz2-1.0,liblzma5,libreadline8,"
    "libncursesw6,libuuid1,libexpat1,libdb5.3,libgdbm6"
)
DEBIAN = "bookworm"
# The base image's variables.
PATH = "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"


def lacks() -> str:
    """What this machine lacks to build an image root; empty: nothing."""
    if os.geteuid():
        return "not root"
    if sys.version_info[:2] != (3, 11):
        return "not Python 3.11, which the lock files are for"
    missing = [name for name in ("debootstrap", "chroot", "unshare") if not shutil.which(name)]
    return f"no {', '.join(missing)}" if missing else ""


@dataclass
class Step:
    """An instruction that ran, and how long it took."""

    text: str
    seconds: float


@dataclass
class Stage:
    """One stage of the Dockerfile."""

    root: Path
    shell: list[str] = field(default_factory=lambda: ["/bin/sh", "-c"])
    folder: str = "/"
    user: str = ""
    command: list[str] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)


def build(folder: Path, arguments: dict[str, str]) -> tuple[Stage, list[Step]]:
    """Execute k8s/Dockerfile below `folder`; return the last stage, and the steps of RUN.

    Parameters
    ----------
    arguments
        Build arguments (`--build-arg`).
    """
    base = folder / "base"
    make_base(base)
    stages: dict[str, Stage] = {}
    steps: list[Step] = []
    given: dict[str, str] = {}
    stage: Stage | None = None
    for name, text in dockerfile((ROOT / "k8s" / "Dockerfile").read_text(encoding="utf-8")):
        if name == "FROM":
            label = text.partition(" AS ")[2] or f"stage{len(stages)}"
            stage = stages[label] = Stage(folder / label)
            subprocess.run(["cp", "--archive", "--reflink=auto", base, stage.root], check=True)
            continue
        assert stage is not None, f"{name} before FROM"
        if name == "RUN":
            began = time.monotonic()
            _run(stage, stages, text, given)
            steps.append(Step(f"RUN {text}", time.monotonic() - began))
        elif name == "COPY":
            *sources, target = text.split()
            for source in sources:
                _copy(ROOT / source, stage.root / _absolute(stage, target), target)
        elif name == "WORKDIR":
            stage.folder = text
            (stage.root / text.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif name == "SHELL":
            stage.shell = json.loads(text)
        elif name == "ARG":
            key, _, default = text.partition("=")
            given[key] = arguments.get(key, default)
        elif name == "USER":
            stage.user = text
        elif name == "EXPOSE":
            stage.ports += map(int, text.split())
        elif name == "CMD":
            stage.command = json.loads(text)
        else:
            raise ValueError(f"{name}: this instruction is unknown here")
    assert stage is not None
    return stage, steps


def make_base(root: Path) -> None:
    """Install Debian, and this process's Python where the base image has its own."""
    # In a mount namespace, because debootstrap leaves /proc mounted in the root.
    subprocess.run(
        [
            *("unshare", "--mount"),
            *("debootstrap", "--variant=minbase", f"--include={BASE_PACKAGES}", DEBIAN, root),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    # As Debian's images: no documents, and no waiting for the disk.
    (root / "etc/dpkg/dpkg.cfg.d/image").write_text(
        "force-unsafe-io\npath-exclude /usr/share/doc/*\npath-exclude /usr/share/man/*\n"
    )
    python = Path(sys.base_prefix)
    minor = f"python{sysconfig.get_python_version()}"
    for source in ("lib", "include"):
        skip = shutil.ignore_patterns("site-packages", "__pycache__", "test", "*.a", "pkgconfig")
        shutil.copytree(
            python / source,
            root / "usr/local" / source,
            ignore=skip,
            dirs_exist_ok=True,
            symlinks=True,
        )
    bin_folder = root / "usr/local/bin"
    shutil.copy2(python / "bin" / minor, bin_folder / minor)
    for name in ("python3", "python"):
        (bin_folder / name).symlink_to(minor)
    (root / "usr/local/lib" / minor / "site-packages").mkdir(exist_ok=True)
    in_root(root, ["sh", "-c", f"ldconfig && {minor} -m ensurepip --default-pip"])


def in_root(root: Path, command: Sequence[str], **variables: str) -> None:
    """Run a command as root in a stage, with this machine's network, certificates and package index."""
    mounts = [
        "mount -t proc proc $R/proc",
        "mount --rbind /dev $R/dev",
        "mount -t tmpfs tmpfs $R/tmp",
    ]
    for path in _index_paths():
        kind = "mkdir -p" if path.is_dir() else "mkdir -p $(dirname $R{0}) && touch"
        mounts.append(f"{kind.format(path)} $R{path} && mount --bind {path} $R{path}")
    script = " && ".join(["set -e", *mounts, f"exec chroot $R {shlex.join(command)}"])
    environment = {
        **{name: value for name, value in os.environ.items() if name.startswith("PIP_")},
        **{name: os.environ[name] for name in ("http_proxy", "https_proxy") if name in os.environ},
        "PATH": PATH,
        "LANG": "C.UTF-8",
        "R": str(root),
        **variables,
    }
    ran = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script], env=environment, capture_output=True, text=True
    )
    if ran.returncode:
        raise RuntimeError(f"{command}: {ran.stdout[-2000:]}{ran.stderr[-4000:]}")


def _index_paths() -> list[Path]:
    """This machine's files that name its package index and resolve its names."""
    ran = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    named = [
        Path(word.removeprefix("file://").removesuffix("/simple"))
        for line in ran.stdout.splitlines()
        for word in line.partition("=")[2].strip("'").split()
    ]
    files = [Path("/etc/pip.conf"), Path("/etc/resolv.conf"), Path("/etc/hosts")]
    files += [Path("/etc/apt/sources.list.d"), Path.home() / ".config/pip"]
    return [path for path in dict.fromkeys(files + named) if path.is_absolute() and path.exists()]


def _run(stage: Stage, stages: dict[str, Stage], text: str, given: dict[str, str]) -> None:
    """Run the command of RUN; a bind mount of another stage is a link for its time."""
    links = []
    while text.startswith("--mount="):
        option, _, text = text.partition(" ")
        values = dict(pair.split("=") for pair in option.removeprefix("--mount=").split(","))
        assert values["type"] == "bind", option
        target = stage.root / values["target"].lstrip("/")
        shutil.copytree(stages[values["from"]].root / values["source"].lstrip("/"), target)
        links.append(target)
    variables = given | {"HOME": "/root"}
    in_root(stage.root, [*stage.shell, f"cd {stage.folder} && {text.strip()}"], **variables)
    for target in links:
        shutil.rmtree(target)


def _absolute(stage: Stage, target: str) -> str:
    return (target if target.startswith("/") else f"{stage.folder}/{target}").lstrip("/")


def _copy(source: Path, target: Path, written: str) -> None:
    if source.is_dir():
        skip = shutil.ignore_patterns("__pycache__", "*.so", "build")
        shutil.copytree(source, target, ignore=skip, dirs_exist_ok=True)
        return
    if written.endswith("/"):
        target = target / source.name
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)
