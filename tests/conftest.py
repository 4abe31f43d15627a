"""Settings and fixtures of all tests: one thread per process, no downloads, reproducible property tests in CI."""

from __future__ import annotations

import faulthandler
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import settings

from quire.replica.checkpoint import transformers_index

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `tests.perf` and modules that tests share

# Set before torch, transformers or ray are imported, here or in a child process.
for _name, _value in {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "GRPC_VERBOSITY": "ERROR",  # no messages about closed connections
}.items():
    os.environ.setdefault(_name, _value)

transformers_index.install()  # Many test modules import transformers before Quire does.

# Times vary too much on shared cores for hypothesis' own deadline; pytest-timeout bounds a test.
settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if "CI" in os.environ else "default")


@pytest.fixture(autouse=True)
def fatal_errors_reach_the_terminal(pytestconfig: pytest.Config) -> Iterator[None]:
    """Restore faulthandler's output: a replica in this process redirects it to its crash report."""
    yield
    faulthandler.enable(file=pytestconfig.stash[fault_handler_stderr_fd_key])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Every test draws the same numbers from torch in every run, whatever ran before it."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the garbage collector away from what imports and collection create: 850,000 objects, which all stay.

    Looking through them took a third of the time of collection, and half a second of every `gc.collect()` in a test.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Set TRITON_INTERPRET before any test module is imported, because Triton reads it when a kernel is defined.

    Without a GPU the kernels run in Triton's interpreter; `pytest -m gpu`, or `--device cuda`, runs them on the GPU.
    """
    marks = config.getoption("markexpr")
    device = config.getoption("device") or (
        "cuda" if "gpu" in marks and "not gpu" not in marks else "cpu"
    )
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise pytest.UsageError("device: cuda was asked for, and torch finds no GPU")
        os.environ.pop("TRITON_INTERPRET", None)
    else:
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add options for the folders' conftest files; pytest accepts them only here."""
    parser.addoption(
        "--device",
        choices=("cpu", "cuda"),
        help="where tests/kernels runs the Triton kernels; cuda with -m gpu, else the interpreter",
    )


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Run a test with one torch thread, then with two."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def free_ports() -> tuple[int, int]:
    """Two TCP ports that are free, and that the system does not give to connections."""
    from quire.cluster.local import ports

    return tuple(ports.free_ports(2))


@pytest.fixture
def ray_environment() -> Iterator[dict[str, str]]:
    """Environment of a child process with its own home and its own folder for Ray.

    The folder's path is short, because Ray's sockets are in it, and their paths may have at most 107 bytes.
    """
    folder = tempfile.mkdtemp(prefix="q-", dir="/tmp")
    home = os.path.join(folder, "home")
    os.mkdir(home)
    yield {**os.environ, "RAY_TMPDIR": folder, "HOME": home}
    shutil.rmtree(folder, ignore_errors=True)
