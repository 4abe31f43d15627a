"""The README's example runs unchanged, and its results equal the references."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from quire.kernels import reference
from quire.kernels.compile.interpreter import kernel_device

DEVICE = kernel_device()
README = Path(__file__).parents[2] / "kernels" / "README.md"


def test_the_example_of_the_readme_runs(close):
    torch.manual_seed(0)
    text, _, _ = README.read_text().partition("## The CPU path")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 3
    x = {}
    for block in blocks:
        exec(block, x)
    step = x["step"]
    assert step["positions"].tolist() == [40, 0, 1, 2, 3, 4]
    assert step["kv_len"].tolist() == [41, 5]
    assert step["slots"].tolist() == [9 * 16 + 8, *range(4 * 16, 4 * 16 + 5)]
    assert x["input_ids"].tolist() == [11, 21, 22, 23, 24, 25]
    expected = reference.paged_attention(
        x["q"],
        x["k_cache"],
        x["v_cache"],
        step["batch_tables"],
        x["cu_q"],
        step["kv_len"],
        64**-0.5,
    )
    close(x["out"], expected, torch.bfloat16)
    assert x["sampled"][1] == x["logits"][1].argmax()
    assert x["last_token"][[3, 5]].tolist() == x["sampled"].tolist()
    assert float(x["edited"][0, 250]) == float("-inf")
    chosen, top, _ = x["scores"]
    assert torch.isfinite(chosen).all() and (chosen <= top[:, 0]).all()
