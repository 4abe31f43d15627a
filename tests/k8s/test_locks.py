"""The lock files of the image: complete, hashed, and what pyproject.toml asks for."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from .manifests import ROOT, lock

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]
WANTED = [Requirement(text) for text in (*PROJECT["project"]["dependencies"], *EXTRAS["otel"])]
LOCKS = ("requirements.lock", "requirements-cpu.lock")
# Of the image.
ENVIRONMENT = default_environment() | {
    "python_version": "3.11",
    "python_full_version": "3.11.14",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
}
Pins = dict[str, tuple[str, list[str]]]


def problems(pins: Pins, wanted: list[Requirement]) -> Iterator[str]:
    """What is missing, has another version or no hash; packages' own requirements as far as they are installed here."""
    for name, (_, hashes) in pins.items():
        if not hashes or not all(re.fullmatch(r"[0-9a-f]{64}", digest) for digest in hashes):
            yield f"{name}: must have SHA-256 hashes"
    todo, seen = [(requirement, "pyproject.toml") for requirement in wanted], set()
    while todo:
        requirement, by = todo.pop()
        name = canonicalize_name(requirement.name)
        if name not in pins:
            yield f"{requirement}: missing, needed by {by}"
            continue
        if not requirement.specifier.contains(pins[name][0], prereleases=True):
            yield f"{requirement}: is {pins[name][0]}, needed by {by}"
        extras = frozenset(requirement.extras)
        if (name, extras) not in seen:
            seen.add((name, extras))
            todo += [(inner, name) for inner in _requirements(name, pins[name][0], extras)]


def _requirements(name: str, version: str, extras: frozenset[str]) -> Iterator[Requirement]:
    """Of a package that is installed here in the locked version."""
    try:
        installed = distribution(name)
    except PackageNotFoundError:
        return
    if Version(installed.version).public != Version(version).public:
        return
    for text in installed.requires or ():
        requirement = Requirement(text)
        contexts = [ENVIRONMENT | {"extra": extra} for extra in {"", *extras}]
        if requirement.marker is None or any(map(requirement.marker.evaluate, contexts)):
            yield requirement


@pytest.mark.parametrize("name", LOCKS)
def test_lock_is_complete(name: str) -> None:
    # The build of torch that is installed here for CPUs has no CUDA libraries, so torch's are not looked at.
    assert list(problems(lock(name), WANTED)) == []


def test_most_packages_are_installed_here_in_the_locked_version() -> None:
    """Otherwise `problems` would see the requirements of few packages."""
    pins = lock("requirements-cpu.lock")
    known = [
        name
        for name, (version, _) in pins.items()
        if list(_requirements(name, version, frozenset()))
    ]
    assert len(known) >= 20


def test_the_build_is_locked_too() -> None:
    wanted = [Requirement(text) for text in PROJECT["build-system"]["requires"]]
    assert list(problems(lock("requirements-build.lock"), wanted)) == []


def test_the_locks_differ_in_torch_alone() -> None:
    gpu, cpu = map(lock, LOCKS)
    different = {name for name in gpu.keys() & cpu.keys() if gpu[name] != cpu[name]}
    assert different <= {"torch", "triton"}
    assert cpu.keys() <= gpu.keys()
    assert all(name.startswith(("nvidia-", "cuda-")) for name in gpu.keys() - cpu.keys())
    assert cpu["torch"][0] == f"{gpu['torch'][0]}+cpu"


@pytest.mark.parametrize(
    ("name", "pin", "said"),
    [
        ("fastapi", None, "missing, needed by pyproject.toml"),
        ("transformers", ("5.3.0", ["0" * 64]), "is 5.3.0"),
        ("click", None, "click"),  # of ray
        ("numpy", ("2.1.0", []), "numpy: must have SHA-256 hashes"),
    ],
)
def test_fault_is_found(name: str, pin: tuple[str, list[str]] | None, said: str) -> None:
    pins = lock("requirements.lock")
    if pin is None:
        del pins[name]
    else:
        pins[name] = pin
    assert any(said in problem for problem in problems(pins, WANTED))
