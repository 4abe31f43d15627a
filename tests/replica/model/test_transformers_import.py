"""A replica has no compiler in memory that it never calls, and whoever asks for it gets it."""

from __future__ import annotations

import subprocess
import sys

# One process for all, because what a process has imported stays.
CHILD = """
import importlib
import sys
import torch
import quire.replica.startup.runtime
from quire.protos.sampling_params import SamplingParams
from quire.replica.engine import Engine
from quire.replica.model import transformers_import

engine = Engine(model="embedded", kv_cache_gib=0.01, num_threads=1)
engine.generate(["Once"], SamplingParams(max_tokens=2), progress=False)
engine.close()
assert "transformers.modeling_utils" in sys.modules
loaded = {"torch._dynamo", "torch.distributed.tensor", "sympy"} & sys.modules.keys()
assert not loaded, loaded
assert torch.cuda.is_available() or "triton" not in sys.modules
assert torch.distributed.is_available()

def is_real(module):
    return "_dynamo" in (module.__file__ or "")

# An import that the stand-in does not have: the second call gets the real module.
calls = []
def import_config():
    calls.append(torch._dynamo.__name__)
    importlib.import_module("torch._dynamo.config")
    return torch._dynamo
if sys.argv[1] == "fails":
    assert is_real(transformers_import.without_compiler(import_config)) and len(calls) == 2
else:
    # A name that the stand-in does not have.
    assert transformers_import.without_compiler(lambda: torch._dynamo.config.suppress_errors) is False
assert is_real(sys.modules["torch._dynamo"]) and is_real(torch._dynamo)
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)) == 2

# transformers makes this mask with `vmap`, inside the compiler's context manager.
from transformers import LlamaConfig
from transformers.masking_utils import create_causal_mask
config = LlamaConfig(hidden_size=8, num_attention_heads=1, attn_implementation="sdpa")
mask = create_causal_mask(
    config, torch.zeros(1, 4, 8), attention_mask=None, past_key_values=None,
    and_mask_function=lambda batch, head, q, k: torch.tensor([True, False, True, True])[k],
)
assert mask.shape == (1, 1, 4, 4) and not mask[..., 1].any() and mask[0, 0, 3, 2], mask
"""


def test_the_compiler_is_loaded_by_those_who_ask_for_it():
    children = [
        subprocess.Popen([sys.executable, "-c", CHILD, case], stderr=subprocess.PIPE, text=True)
        for case in ("fails", "asks")
    ]
    for child in children:
        _, errors = child.communicate()
        assert child.returncode == 0, errors
