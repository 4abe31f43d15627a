"""Products of experts in a fixed order: equal to a loop, with bits that do not depend on the batch."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.rows.experts_fixed import combine_experts, experts_product, plan_experts
from tests.kernels.compile.interpreter import kernel_device

DEVICE = kernel_device()
EXPERTS, CHOICES = 5, 2


def choices(tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, EXPERTS, generator=generator).topk(CHOICES).indices
    return ids.to(DEVICE)


def normal(*shape, dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


@pytest.mark.parametrize("tokens", [1, 7, 200])
def test_the_plan_lists_every_pair_once_with_its_expert(tokens):
    ids = choices(tokens)
    plan = plan_experts(ids, EXPERTS, torch.float32)  # tiles of 32
    listed = []
    for expert, first, count in plan.tiles.tolist():
        assert 0 <= count <= 32
        own = plan.pairs[first : first + count].tolist()
        assert all(ids.flatten()[pair] == expert for pair in own)
        listed += own
    assert sorted(listed) == list(range(tokens * CHOICES))


def test_more_pairs_and_experts_than_a_block_of_the_plan():
    ids = torch.arange(3000, device=DEVICE).remainder(7).view(1500, 2)
    plan = plan_experts(ids, 7, torch.float32)
    counts = torch.zeros(7, dtype=torch.int64)
    for expert, _, count in plan.tiles.tolist():
        counts[expert] += count
    assert counts.tolist() == torch.bincount(ids.flatten().cpu(), minlength=7).tolist()
    assert sorted(plan.pairs.tolist()) == list(range(3000))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_is_the_reference(dtype, transposed, close):
    tokens, columns, depth = 40, 70, 50
    ids, x = choices(tokens), normal(tokens, depth, dtype=dtype)
    weight = normal(EXPERTS, columns, depth, dtype=dtype, seed=2) * depth**-0.5
    bias = normal(EXPERTS, columns, dtype=dtype, seed=3)
    plan = plan_experts(ids, EXPERTS, dtype)
    given = weight.transpose(1, 2).contiguous() if transposed else weight
    found = experts_product(x, given, plan, bias=bias, transposed=transposed)
    expert = ids.flatten()
    rows = x.float().repeat_interleave(CHOICES, 0)
    expected = torch.einsum("pk,pnk->pn", rows, weight.float()[expert]) + bias.float()[expert]
    close(found, expected, dtype)
    inner = experts_product(found[:, :depth].contiguous(), given, plan, transposed=transposed)
    again = torch.einsum("pk,pnk->pn", found[:, :depth].float(), weight.float()[expert])
    close(inner, again, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_bit_equal_in_every_batch(dtype):
    tokens, columns, depth = 90, 40, 48
    ids, x = choices(tokens), normal(tokens, depth, dtype=dtype)
    weight = normal(EXPERTS, columns, depth, dtype=dtype, seed=2)
    scores = normal(tokens, CHOICES, dtype=dtype, seed=4)

    def result(rows):
        own = ids[rows].contiguous()
        pairs = experts_product(x[rows], weight, plan_experts(own, EXPERTS, dtype))
        return combine_experts(pairs, scores[rows].contiguous())

    whole = result(slice(0, tokens))
    for rows in (slice(0, 1), slice(89, 90), slice(3, 40), slice(20, 85)):
        assert torch.equal(result(rows), whole[rows])
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    assert torch.equal(result(order), whole[order])


def test_choices_are_added_in_their_order():
    x = torch.tensor([[1.0], [2.0**24], [-(2.0**24)]], device=DEVICE)
    one = torch.ones(1, 3, device=DEVICE)
    assert combine_experts(x, one).item() == 0.0  # (1 + 2^24) - 2^24
    assert combine_experts(x[[1, 2, 0]], one).item() == 1.0


def test_bad_arguments_are_named():
    ids, x = choices(3), normal(3, 16)
    plan = plan_experts(ids, EXPERTS, torch.float32)
    weight = normal(EXPERTS, 8, 16)
    for call, message in (
        (
            lambda: plan_experts(ids.float(), EXPERTS, torch.float32),
            "experts: must be one of int64",
        ),
        (
            lambda: plan_experts(ids.T, EXPERTS, torch.float32),
            "experts: must be a contiguous matrix",
        ),
        (
            lambda: experts_product(x, weight[:4], plan),
            "experts of weight: must be between 5 and 5",
        ),
        (lambda: experts_product(x[:, :8], weight, plan), r"x: must have shape \[any, 16\]"),
        (lambda: experts_product(x[:2], weight, plan), "rows of x times choices"),
        (lambda: experts_product(x, weight, plan, bias=x), r"bias: must have shape \[5, 8\]"),
        (lambda: combine_experts(x, normal(2, 2)), r"x: must have shape \[4, any\]"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
