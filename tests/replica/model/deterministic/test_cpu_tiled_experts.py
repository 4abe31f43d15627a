"""Mixtures of experts: transformers' result, and the same bits whoever else is in the batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from quire.replica.model.deterministic.cpu_tiled_experts import TiledExperts
from quire.replica.model.deterministic.cpu_tiled_linear import make_deterministic
from quire.replica.model.deterministic.stacked_experts import ExpertRouter

HIDDEN = 48


def qwen(normalize: bool, activation: str = "silu") -> nn.Module:
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN,
        hidden_act=activation,
        moe_intermediate_size=20,
        num_experts=7,
        num_experts_per_tok=3,
        norm_topk_prob=normalize,
        experts_implementation="eager",
    )
    return Qwen3MoeSparseMoeBlock(config)


def gpt_oss() -> nn.Module:
    config = GptOssConfig(
        hidden_size=HIDDEN,
        intermediate_size=20,
        num_local_experts=7,
        num_experts_per_tok=3,
        experts_implementation="eager",
    )
    return GptOssMLP(config)


BLOCKS = {
    "qwen": lambda: qwen(True),
    "qwen_raw": lambda: qwen(False),
    "qwen_relu": lambda: qwen(True, "relu"),
    "gpt_oss": gpt_oss,
}


@pytest.fixture(params=BLOCKS)
def block(request):
    torch.manual_seed(3)
    module = BLOCKS[request.param]()
    for parameter in module.parameters():
        parameter.data.normal_(0, 0.4)
    return module.requires_grad_(False)


def output(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = block(x)
    return out[0] if isinstance(out, tuple) else out


def test_equals_transformers_and_does_not_depend_on_the_batch(block):
    x = torch.randn(1, 150, HIDDEN) * 3  # wide enough that gpt-oss clamps
    reference = output(block, x)
    make_deterministic(block)
    kinds = {type(module) for module in block.modules()}
    assert ExpertRouter in kinds and any(issubclass(kind, TiledExperts) for kind in kinds)
    expected = output(block, x)
    torch.testing.assert_close(expected, reference, atol=2e-4, rtol=2e-4)
    for start, end in [(0, 1), (7, 8), (3, 20), (1, 150), (0, 64), (149, 150)]:
        assert torch.equal(output(block, x[:, start:end]), expected[:, start:end])
    order = torch.randperm(150)
    assert torch.equal(output(block, x[:, order]), expected[:, order])


def test_weights_stay_one_tensor(block):
    before = {id(p) for p in block.parameters()}
    make_deterministic(block)
    assert {id(p) for p in block.parameters()} == before
