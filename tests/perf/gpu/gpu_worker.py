"""A plugin of pytest (`-p tests.perf.gpu.gpu_worker`): a test that leaves the GPU unusable ends its worker alone.

After an illegal address every later call of CUDA in the process fails, so its later tests would all fail for that one.
pytest-xdist starts another worker in place of one that ended; the test is reported twice, with its own error and as
the one that ended the worker.
"""

from __future__ import annotations

import os
import sys

STATUS = 70


def pytest_runtest_logfinish(nodeid: str) -> None:
    """The test's reports are sent; end the process if no further test can run in it."""
    error = device_error()
    if error is not None and "PYTEST_XDIST_WORKER" in os.environ:
        print(
            f"{nodeid}: the device is unusable after it: {error}", file=sys.__stderr__, flush=True
        )
        os._exit(STATUS)


def device_error() -> Exception | None:
    """What CUDA says when it is asked to finish its work; None where nothing uses it."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.synchronize()
    except Exception as error:
        return error
    return None
