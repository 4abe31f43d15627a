"""`deterministic: true` on a GPU, without one: the products, and requests whose bits depend on themselves alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import model_zoo
import pytest
import torch
from torch import nn

from quire.kernels.rows.matmul_fixed import matmul_fixed
from quire.replica.model.deterministic.gpu_fixed_products import FixedLinear, fix_products
from quire.replica.model.fusion.fused_parts import Product
from quire.replica.model.layers.fp8 import Fp8Linear
from tests.kernels.compile.interpreter import repair_interpreter

pytestmark = pytest.mark.skipif(
    not os.environ.get("TRITON_INTERPRET"), reason="the kernels are not interpreted"
)
# Two layers with few heads, of a size that the kernels take.
_SMALL = dict(head_dim=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
MODELS = {
    "llama": _SMALL,
    "gemma3": _SMALL | dict(layer_types=["sliding_attention", "full_attention"]),
    "qwen3_moe": _SMALL | dict(mlp_only_layers=[0]),
    "gpt_oss": _SMALL | dict(layer_types=["sliding_attention", "full_attention"]),
}


def compare(folder: Path, jobs: list[tuple[str, str, bool]]) -> list[dict]:
    """What `interpreted_order.py` finds for each model, dtype and `deterministic`."""
    told = []
    for number, (name, dtype, deterministic) in enumerate(jobs):
        path = model_zoo.build(name, folder / str(number), **MODELS[name])
        config = dict(dtype=dtype, deterministic=deterministic)
        told.append({"path": str(path), "config": config})
    (folder / "jobs.json").write_text(json.dumps(told))
    program = Path(__file__).parents[2] / "interpreted_order.py"
    done = subprocess.run(
        [sys.executable, str(program), str(folder / "jobs.json"), str(folder / "out.json")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "out.json").read_text())


def check_fixed(found: dict) -> None:
    """The bits were equal, and every way was taken."""
    assert found["different"] == []
    assert found["hits"] == 16 and found["preemptions"] > 0
    assert "FixedLinear" in found["modules"]
    assert not {"Linear", "Product"} & set(found["modules"])
    assert found["workspace"] == []  # of the decode kernel, which is not used


# Tests have several models, because a process takes longer to import than a model takes to run.
def test_bits_are_equal_in_any_company_and_on_any_way(tmp_path):
    jobs = [("gemma3", "bfloat16"), ("gemma3", "float32"), ("qwen3_moe", "bfloat16")]
    for found in compare(tmp_path, [(*job, True) for job in jobs]):
        check_fixed(found)


def test_bits_of_a_plain_model_are_equal_with_it_and_differ_without(tmp_path):
    """They differ in float32; in bfloat16 the rounding of each result hides most of it."""
    jobs = [("llama", "bfloat16", True), ("llama", "float32", True), ("llama", "float32", False)]
    *equal, without = compare(tmp_path, jobs)
    for found in equal:
        check_fixed(found)
    ways = {"among others", "in chunks of 5", "after a prefix hit"}
    assert ways & set(without["different"])
    assert without["workspace"] != []


@pytest.fixture(autouse=True)
def repaired():
    repair_interpreter()


def linear(columns, depth, bias=True, dtype=torch.float32):
    return nn.Linear(depth, columns, bias=bias, dtype=dtype).requires_grad_(False)


def test_every_product_is_replaced_and_its_parameters_are_shared():
    model = nn.Sequential(linear(5, 7), Product([linear(3, 5), linear(2, 5)]), nn.SiLU())
    weights = [module.weight for module in model[:2]]
    fix_products(model)
    fix_products(model)
    assert [type(module) for module in model[:2]] == [FixedLinear] * 2
    assert all(module.weight is weight for module, weight in zip(model[:2], weights, strict=True))
    x = torch.randn(2, 3, 7)
    inner = matmul_fixed(x.view(6, 7), weights[0], bias=model[0].bias)
    expected = matmul_fixed(inner, weights[1], bias=model[1].bias).view(2, 3, 5)
    residual = torch.randn(2, 3, 5)
    assert torch.equal(model[:2](x), expected)
    assert torch.equal(model[1](model[0](x), residual), expected + residual)
    assert {name for name, _ in model.named_buffers()} == {"0.bias", "1.bias"}


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixtures_of_experts_are_those_of_the_model(name, dtype):
    import transformers

    kind, options = model_zoo._MODELS[name]
    # Whole vectors: torch's sigmoid on the CPU gives the tail of a tensor other bits, so the last token would differ.
    sizes = dict(intermediate_size=64, moe_intermediate_size=64)
    config = kind(**{**model_zoo._TINY, **options, **MODELS[name], **sizes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    block = model.model.layers[-1].mlp.requires_grad_(False)
    x = torch.randn(1, 40, config.hidden_size, dtype=dtype)
    expected = block(x)
    fix_products(block)
    found = block(x)
    expected, found = (y[0] if isinstance(y, tuple) else y for y in (expected, found))
    deviation = (found.float() - expected.float()).pow(2).mean().sqrt()
    bound = 1e-5 if dtype == torch.float32 else 0.02
    assert deviation < bound * expected.float().pow(2).mean().sqrt()
    for tokens in (slice(0, 1), slice(7, 30)):
        part = block(x[:, tokens])
        assert torch.equal(part[0] if isinstance(part, tuple) else part, found[:, tokens])


def test_what_cannot_hold_is_named():
    norm = nn.RMSNorm(7)
    with pytest.raises(ValueError, match=r"1 \(RMSNorm\) runs as torch's own .*; set fuse: auto"):
        fix_products(nn.Sequential(linear(5, 7), norm))
    with pytest.raises(
        ValueError, match=r"cannot hold: 0 is in 8 bits, .* set deterministic: false"
    ):
        fix_products(nn.Sequential(Fp8Linear(16, 16)))
