"""`deterministic: true` on the CPU for modules that Quire does not replace: their rows have bits of their own."""

from __future__ import annotations

import random

import model_zoo
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from quire.protos.sampling_params import SamplingParams
from quire.replica.engine import Engine
from quire.replica.model.deterministic.cpu_row_check import (
    FORMS,
    NotDeterministicError,
    fix_other_modules,
)

# Mixtures of experts with routers of three kinds; with latents, with recurrent layers; with gates of heads.
MODELS = ("mixtral", "deepseek_v3", "qwen3_next", "nemotron_h", "laguna")
NUM_TOKENS = 24


@pytest.mark.parametrize("model_type", MODELS)
def test_bits_are_equal_in_chunks_after_hits_and_beside_others(model_type, tmp_path):
    rng = random.Random(1)
    prompts = [[rng.randrange(5, 60) for _ in range(37 + 3 * i)] for i in range(5)]
    greedy = dict(temperature=0.0, ignore_eos=True, logprobs=2)
    params = SamplingParams(max_tokens=NUM_TOKENS, **greedy)
    model_zoo.build_proven(model_type, tmp_path)
    options = dict(model=str(tmp_path), dtype="float32", num_threads=1, prove=False)
    with Engine(deterministic=True, **options) as engine:
        (alone,) = engine.generate(prompts[:1], params, progress=False)
        (hit,) = engine.generate(prompts[:1], params, progress=False)
        beside, *_ = engine.generate(prompts, params, progress=False)
        rest = SamplingParams(max_tokens=NUM_TOKENS - 10, **greedy)
        given = prompts[0] + alone.token_ids[:10]
        (resumed,) = engine.generate([given], rest, progress=False)
    with Engine(deterministic=True, max_batch_tokens=16, **options) as engine:
        (chunked,) = engine.generate(prompts[:1], params, progress=False)
    assert hit.num_cached_tokens > 0
    for other in (hit, beside, chunked):
        assert (other.token_ids, other.logprobs) == (alone.token_ids, alone.logprobs)
    assert resumed.logprobs == alone.logprobs[10:]


def test_a_model_that_cannot_be_fixed_is_served_where_nobody_asked_for_it(tmp_path):
    model_zoo.build_proven("aria_text", tmp_path)
    options = dict(model=str(tmp_path), dtype="float32", num_threads=1, prove=False)
    with pytest.raises(NotDeterministicError, match="AriaTextMoELayer"):
        Engine(deterministic=True, **options)
    with Engine(**options) as engine:
        assert engine.config.deterministic is False
        (answer,) = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=3), progress=False)
        assert len(answer.token_ids) == 3


@pytest.mark.parametrize("function", FORMS)
def test_functions_have_the_bits_of_an_element_at_every_position(function):
    x, form = torch.randn(4099) * 5, FORMS[function]
    whole = form(x)
    # torch's own GELU is off by up to 1.2e-6 in float32.
    torch.testing.assert_close(whole.double(), function(x.double()), atol=1e-6, rtol=1e-5)
    for count in (1, 2, 3, 7, 9, 15, 17, 33, 1000):
        for begin in (0, 1, 3, 11):
            assert torch.equal(form(x[begin : begin + count].clone()), whole[begin : begin + count])


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_both_kinds_of_gelu_have_forms(approximate):
    x = torch.randn(500)
    found = FORMS[F.gelu](x, approximate=approximate)
    torch.testing.assert_close(found, F.gelu(x, approximate=approximate))


class Gated(nn.Module):
    """Takes more than rows, as attention does."""

    def forward(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
        return x * F.softplus(x[..., :3].contiguous()).sum(-1, keepdim=True) * scale


class Mixing(nn.Module):
    """A router and an expert; the rows of a call change the result by `rounding`."""

    def __init__(self, rounding: float):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 16))
        self.rounding = rounding

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = F.linear(x, self.weight)
        return torch.sigmoid(logits) + self.rounding * x.shape[-2]


class Trial:
    """Calls the decoder with a few rows."""

    def __init__(self, decoder: nn.Module):
        self._decoder = decoder

    def context(self) -> None:
        return None

    def run(self, context: None) -> None:
        for module in self._decoder:
            module(torch.randn(1, 5, 16))

    def normal(self, like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape)


class ScaledTrial(Trial):
    def run(self, context: None) -> None:
        for module in self._decoder:
            module(torch.randn(1, 5, 16), scale=1.0)


@torch.inference_mode()
def test_a_module_that_takes_more_than_rows_gets_fixed_functions():
    decoder = nn.Sequential(Gated())
    fix_other_modules(decoder, ScaledTrial(decoder))
    x = torch.randn(40, 16) * 4
    whole = decoder[0](x, scale=2.0)
    for begin, end in ((0, 1), (3, 5), (7, 18), (0, 39)):
        assert torch.equal(decoder[0](x[begin:end], scale=2.0), whole[begin:end])


@torch.inference_mode()
def test_what_calls_products_is_fixed_and_what_cannot_be_fixed_is_named():
    decoder = nn.Sequential(Mixing(0.0))
    fix_other_modules(decoder, Trial(decoder))
    x = torch.randn(1, 40, 16)
    whole = decoder[0](x)
    for begin, end in ((0, 1), (3, 5), (7, 18), (0, 39)):
        assert torch.equal(decoder[0](x[:, begin:end]), whole[:, begin:end])
    decoder = nn.Sequential(nn.Identity(), Mixing(1e-5))
    with pytest.raises(
        NotDeterministicError, match=r"the rows of 1 \(Mixing\) have other bits in other comp"
    ):
        fix_other_modules(decoder, Trial(decoder))
    # It mixes tokens by design.
    decoder = nn.Sequential(Mixing(0.5))
    fix_other_modules(decoder, Trial(decoder))
