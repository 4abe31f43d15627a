"""What all tests share: one thread per process, no downloads, reproducible property tests in CI."""

from __future__ import annotations

import faulthandler
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `tests.perf` and tests that share parts

# Before torch, transformers or ray are imported, here or in a child process.
for _name, _value in {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "GRPC_VERBOSITY": "ERROR",  # its notices of connections that end, as they shall
}.items():
    os.environ.setdefault(_name, _value)

# Times vary too much on shared cores for hypothesis' own deadline; pytest-timeout bounds a test.
settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if "CI" in os.environ else "default")


@pytest.fixture(autouse=True)
def fatal_errors_reach_the_terminal(pytestconfig: pytest.Config) -> Iterator[None]:
    """A replica that runs in this process has such errors written to its own crash report from then on."""
    yield
    faulthandler.enable(file=pytestconfig.stash[fault_handler_stderr_fd_key])


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Triton reads this variable where a kernel is defined, so before any test module is imported.

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
    """Options of the folders' own conftest files: pytest wants them here."""
    parser.addoption(
        "--device",
        choices=("cpu", "cuda"),
        help="where tests/kernels runs the Triton kernels; cuda with -m gpu, else the interpreter",
    )


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """torch's threads during a test, one and then two."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def free_ports() -> tuple[int, int]:
    """Two TCP ports that nobody listens on and that no connection is given meanwhile."""
    from quire.cluster.local import ports

    return tuple(ports.free_ports(2))


@pytest.fixture
def ray_environment() -> Iterator[dict[str, str]]:
    """Environment of a child process whose Ray keeps to a folder and a home of its own.

    The folder's path is short: Ray puts sockets in it, whose paths may have 107 bytes.
    """
    folder = tempfile.mkdtemp(prefix="q-", dir="/tmp")
    home = os.path.join(folder, "home")
    os.mkdir(home)
    yield {**os.environ, "RAY_TMPDIR": folder, "HOME": home}
    shutil.rmtree(folder, ignore_errors=True)
