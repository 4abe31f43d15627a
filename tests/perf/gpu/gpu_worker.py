"""pytest plugin (`-p tests.perf.gpu.gpu_worker`): a test that leaves the GPU unusable ends only its own worker.

After an illegal address every later CUDA call of the process fails, and so would all its later tests. pytest-xdist
replaces a worker that has ended. The test is reported twice: with its own error, and as the test that ended the worker.
"""

from __future__ import annotations

import os
import sys

STATUS = 70


def pytest_runtest_logfinish(nodeid: str) -> None:
    """After the test's reports were sent, end the process if the device is unusable."""
    error = device_error()
    if error is not None and "PYTEST_XDIST_WORKER" in os.environ:
        print(
            f"{nodeid}: the device is unusable after it: {error}", file=sys.__stderr__, flush=True
        )
        os._exit(STATUS)


def device_error() -> Exception | None:
    """The error of a CUDA synchronisation; None without an error, or if CUDA is not in use."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.synchronize()
    except Exception as error:
        return error
    return None
