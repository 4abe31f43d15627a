"""A CPU replica has no Triton in memory that nothing calls, and whoever asks for it gets it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

CHILD = """
import sys
{before}
import quire.replica.startup.runtime
from quire.protos.sampling_params import SamplingParams
from quire.replica.engine import Engine

engine = Engine(model="embedded", kv_cache_gib=0.01, num_threads=1)
engine.generate(["Once"], SamplingParams(max_tokens=2), progress=False)
engine.close()
print("transformers.modeling_utils" in sys.modules, "triton" in sys.modules)
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
    assert child.stdout.split()[-3:] == ["True", str(is_there), "triton.language"]
