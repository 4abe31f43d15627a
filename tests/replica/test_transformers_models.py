"""A CPU replica has no Triton in memory that nothing calls, and whoever asks for it gets it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

CHILD = """
import sys
{before}
import quire.replica.loader, quire.replica.attention
import transformers.modeling_utils
print("triton" in sys.modules)
import triton, triton.language
print(triton.language.__name__)
"""


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="there Triton is what the kernels are compiled with"
)
@pytest.mark.parametrize("before, is_there", [("", False), ("import triton", True)])
def test_triton_is_imported_by_those_who_ask_for_it(before, is_there):
    pytest.importorskip("triton")
    child = subprocess.run(
        [sys.executable, "-c", CHILD.format(before=before)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert child.stdout.split() == [str(is_there), "triton.language"]
