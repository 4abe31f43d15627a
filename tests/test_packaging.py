"""The distribution: its files, and its use without the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NOT_PACKAGED = {"tests", "k8s", "build", "dist"}
# Documents, and sources of the compiled libraries.
NOT_SHIPPED = (".md", ".pyc", ".c", ".h", ".so")
_SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
LIBRARIES = {f"quire/{folder}/_native{_SUFFIX}" for folder in ("kernels/cpu", "router")}
HAS_COMPILER = shutil.which(os.environ.get("CC", "cc")) is not None


QUICK_COMPILER = r"""#!/bin/bash
set -e
options=("${@/#-O[23]/-Og}" -g0)
for ((i = 1; i < $#; i++)); do
  if [[ "${!i}" == -o ]]; then j=$((i + 1)) && output="${!j}"; fi
done
if [[ " $* " != *" -c "* ]]; then exec "$REAL_CC" "${options[@]}"; fi
# Folders of headers differ, but no source includes a header of Python's.
what=("${options[@]/$output/}")
kept="$OBJECTS/$(printf '%s\n' "${what[@]/#-I*/}" | sha256sum | cut -c1-64).o"
exec 9>"$kept.lock"
flock 9
if [[ ! -e "$kept" ]]; then
  "$REAL_CC" "${options[@]}"
  cp "$output" "$kept"
else
  cp "$kept" "$output"
fi
"""


def package_folders() -> dict[str, Path]:
    """Map `quire.x.y` to its folder, for every folder with an `__init__.py`."""
    found = {}
    for init in ROOT.glob("[a-z]*/**/__init__.py"):
        parts = init.relative_to(ROOT).parts[:-1]
        if parts[0] not in NOT_PACKAGED:
            found[".".join(("quire", *parts))] = init.parent
    return found


def packaged_files() -> set[str]:
    """Paths inside the wheel of every file that the package folders hold."""
    paths = set()
    for package, folder in package_folders().items():
        for path in folder.rglob("*"):
            inner = path.relative_to(folder)
            if path.is_file() and path.suffix not in NOT_SHIPPED:
                paths.add(str(Path(package.replace(".", "/")) / inner))
    return paths


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of the sources of a build, so that a build writes nothing into the repository."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, copy / name)
    for name in {package.split(".")[1] for package in package_folders()}:
        shutil.copytree(
            ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.so")
        )
    return copy


def pip(*arguments: object, **environment: str) -> None:
    """Run pip with this environment's setuptools and without an index."""
    command = [sys.executable, "-m", "pip", *map(str, arguments)]
    result = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope="module")
def quick_compiler(tmp_path_factory) -> dict[str, str]:
    """Environment variables for a compiler with less optimisation, which compiles each source once.

    The full build takes a minute, and the tests' environment has it already. The sources stay the same here, so a later
    build with the same options gets copies of the first one's objects, also in another worker of pytest-xdist.
    """
    folder = tmp_path_factory.mktemp("compiler")
    compiler = folder / "cc"
    compiler.write_text(QUICK_COMPILER)
    compiler.chmod(0o755)
    base = tmp_path_factory.getbasetemp()
    objects = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled objects"
    objects.mkdir(exist_ok=True)
    return {"CC": str(compiler), "REAL_CC": os.environ.get("CC", "cc"), "OBJECTS": str(objects)}


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory, quick_compiler) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    options = ("--no-deps", "--no-build-isolation", "--no-index")
    pip("wheel", *options, "-w", folder, source, **quick_compiler)
    (path,) = folder.glob("quire-*.whl")
    return path


def empty_environment(folder: Path) -> Path:
    """An environment that has the dependencies of this one but not its `quire`.

    A .pth file adds this environment's site-packages as a plain folder, so Python does not read the .pth files in it,
    among them that of an editable installation.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site_packages = folder / "lib" / version / "site-packages"
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    python = folder / "bin" / "python"
    assert run(python, "import quire").returncode != 0, "the environment has a quire already"
    return python


def run(python: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code that sees neither the working directory nor PYTHONPATH."""
    return subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, cwd="/")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory) -> Iterator[Path]:
    """The Python of an environment in which the wheel is installed."""
    python = empty_environment(tmp_path_factory.mktemp("environment") / "venv")
    pip("--python", python, "install", "--no-deps", "--no-index", wheel)
    yield python


def test_every_package_folder_is_listed():
    assert sorted(package_folders()) == sorted(PYPROJECT["tool"]["setuptools"]["packages"])


def test_the_wheel_holds_every_file_of_the_packages(wheel: Path):
    names = set(zipfile.ZipFile(wheel).namelist())
    shipped = {name for name in names if not re.match(r"quire-[^/]*\.dist-info/", name)}
    assert shipped == packaged_files() | (LIBRARIES if HAS_COMPILER else set())
    assert "quire/replica/builtin_model/checkpoint/model.safetensors" in shipped


def test_the_wheel_has_its_licence_and_no_top_level_but_quire(wheel: Path):
    archive = zipfile.ZipFile(wheel)
    tops = {name.split("/")[0] for name in archive.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"quire"}
    (metadata,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    assert "License-Expression: Apache-2.0" in archive.read(metadata).decode()
    (licence,) = (n for n in archive.namelist() if n.endswith("/LICENSE"))
    assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()


def test_every_module_of_the_wheel_imports_where_the_repository_is_not(
    wheel: Path, installed: Path
):
    modules = sorted(
        name.removesuffix("/__init__.py").removesuffix(".py").replace("/", ".")
        for name in zipfile.ZipFile(wheel).namelist()
        if name.endswith(".py") and not name.endswith("__main__.py")
    )
    assert "quire.cluster.cli" in modules
    code = f"""
import importlib, sys
for name in {modules}:
    module = importlib.import_module(name)
    assert module.__file__.startswith(sys.prefix), (name, module.__file__)
"""
    result = run(installed, code)
    assert result.returncode == 0, result.stderr


def test_the_embedded_checkpoint_is_found_in_the_wheel(installed: Path):
    code = """
import sys
from quire.replica.builtin_model import CHECKPOINT
assert str(CHECKPOINT).startswith(sys.prefix), CHECKPOINT
for name in ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json"):
    assert (CHECKPOINT / name).is_file(), name
"""
    result = run(installed, code)
    assert result.returncode == 0, result.stderr


def test_the_wheels_command_checks_a_config(installed: Path):
    command = [installed.parent / "quire", "config", "check", ROOT / "cluster.yaml"]
    result = subprocess.run(command, capture_output=True, text=True, cwd="/")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("quire: /: model embedded")


ATTEND_AND_LOOK_UP = """
import sys, numpy, torch
from quire.kernels.cpu import cpu_attention
from quire.protos.routing_hash import RoutingHasher
from quire.router import compiled_router
from quire.router.index.block_table import BlockTable
from quire.router.index.prefix_hashes import prefix_hashes
assert cpu_attention.__file__.startswith(sys.prefix)
cache = torch.randn(2, 1, 8, 16)
rows = [torch.tensor(x) for x in ([[1, 0]], [0, 1], [12])]
out = cpu_attention.paged_attention(torch.randn(1, 2, 16), cache, cache, *rows, 0.25)
assert torch.isfinite(out).all()
table, hashes = BlockTable(100), prefix_hashes(RoutingHasher("m"), numpy.arange(640, dtype=numpy.int32))
table.insert(hashes, numpy.arange(1, 11, dtype=numpy.int32))
assert table.find(hashes)[1].tolist() == [*range(1, 11)]
print(cpu_attention.has_native(), compiled_router.load() is not None)
"""


@pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler")
def test_the_installed_libraries_attend_and_look_up(installed: Path):
    result = run(installed, ATTEND_AND_LOOK_UP)
    assert (result.stdout, result.stderr) == ("True True\n", "")


def test_without_a_compiler_the_source_distribution_installs_and_works(source: Path, tmp_path):
    build = "import sys, setuptools.build_meta as b; print(b.build_sdist(sys.argv[1]))"
    command = [sys.executable, "-c", build, tmp_path]
    result = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (archive,) = tmp_path.glob("quire-*.tar.gz")
    with tarfile.open(archive) as tar:
        held = {name.partition("/")[2] for name in tar.getnames()}
    assert {str(path.relative_to(ROOT)) for path in ROOT.glob("[a-z]*/native/*")} <= held

    options = ("--no-deps", "--no-build-isolation", "--no-index")
    pip("wheel", *options, "-w", tmp_path, archive, CC="false")
    (wheel,) = tmp_path.glob("quire-*.whl")
    assert LIBRARIES.isdisjoint(zipfile.ZipFile(wheel).namelist())
    python = empty_environment(tmp_path / "venv")
    pip("--python", python, "install", "--no-deps", "--no-index", wheel)
    result = run(python, ATTEND_AND_LOOK_UP)
    assert (result.stdout, result.stderr) == ("False False\n", "")


def test_an_editable_install_runs_the_source_folder(source: Path, tmp_path, quick_compiler):
    python = empty_environment(tmp_path / "venv")
    options = ("--no-deps", "--no-build-isolation", "--no-index")
    pip("--python", python, "install", *options, "-e", source, **quick_compiler)
    code = "from quire.cluster import cli; from quire.replica import builtin_model; print(cli.__file__)"
    result = run(python, code)
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()) == source / "cluster" / "cli.py"
    for library in LIBRARIES:
        assert (source / library.removeprefix("quire/")).exists() == HAS_COMPILER
    result = subprocess.run([python.parent / "quire", "--version"], capture_output=True, text=True)
    assert result.stdout == "quire 0.1.0\n"


# --------------------------------------------------------------------------------------------------
# Dependencies
# --------------------------------------------------------------------------------------------------


def lower_bound(name: str) -> Version:
    for text in PYPROJECT["project"]["dependencies"]:
        requirement = Requirement(text)
        if requirement.name == name:
            return max(Version(s.version) for s in requirement.specifier if s.operator == ">=")
    raise AssertionError(f"{name} is not a dependency")


def test_dependencies_have_a_lower_and_an_upper_bound():
    for text in PYPROJECT["project"]["dependencies"]:
        operators = {s.operator for s in Requirement(text).specifier}
        assert operators == {">=", "<"}, text


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("starlette", "1.0.1"),  # CVE-2026-48710: Host decides what request.url says
        ("transformers", "5.17"),  # CVE-2026-5241: config.json runs code
        ("jinja2", "3.1.6"),  # CVE-2025-27516: `attr` leaves the sandbox
        ("ray", "2.58"),  # CVE-2026-27482: jobs without a token
    ],
)
def test_versions_with_known_holes_are_not_allowed(name: str, version: str):
    assert lower_bound(name) >= Version(version)


def test_generated_code_runs_with_the_oldest_allowed_protobuf_and_grpcio():
    generated = sorted((ROOT / "protos").glob("*_pb2*.py"))
    assert generated
    for path in generated:
        text = path.read_text()
        if match := re.search(r"GRPC_GENERATED_VERSION = '([\d.]+)'", text):
            assert Version(match[1]) <= lower_bound("grpcio"), path.name
        if match := re.search(r"PUBLIC,\s*(\d+),\s*(\d+),\s*(\d+),", text):
            assert Version(".".join(match.groups())) <= lower_bound("protobuf"), path.name


# The extra that a folder or module may import.
EXTRAS = {
    "cluster/bench/": "bench",
    "cluster/tracing/": "otel",
    "replica/kv_transport/nixl_memory.py": "nixl",
}


def test_what_the_package_imports_is_a_dependency(installed: Path):
    """Check the distribution of each imported module, so that no import works by accident."""
    code = """
import ast, importlib.metadata, pathlib, sys
import quire.cluster
owners = importlib.metadata.packages_distributions()
root = pathlib.Path(quire.cluster.__file__).parents[1]
for path in root.rglob("*.py"):
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module]
        for top in {name.split(".")[0] for name in names}:
            if top not in sys.stdlib_module_names and top not in ("quire", "google"):
                print(path.relative_to(root), top, *owners.get(top, [top]))
"""
    result = run(installed, code)
    assert result.returncode == 0, result.stderr
    project = PYPROJECT["project"]
    declared = _names(project["dependencies"])
    # Parts of a declared dependency that are meant to be imported.
    declared |= {"uvicorn", "pydantic-core"}
    for line in result.stdout.splitlines():
        path, module, *owners = line.split()
        owners = {re.sub(r"[-_.]+", "-", owner).lower() for owner in owners}
        extra = _names(
            requirement
            for folder, name in EXTRAS.items()
            for requirement in project["optional-dependencies"][name]
            if path.startswith(folder)
        )
        assert owners & (declared | extra), f"{path} imports {module} of {owners}"


def _names(requirements: Iterable[str]) -> set[str]:
    return {re.sub(r"[-_.]+", "-", Requirement(text).name).lower() for text in requirements}
