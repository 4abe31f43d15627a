"""Rotation, QK-norm and KV write: correct by the reference, and only the right slots are written."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels.argument_checks import HEAD_DIMS
from quire.kernels.rows.kv_write import write_kv
from tests.kernels import reference
from tests.kernels.compile.interpreter import kernel_device

DEVICE = kernel_device()
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
FP8 = torch.float8_e4m3fn


class Step:
    """Random tokens, slices of one fused projection, and a pool of NaN with room between layers."""

    def __init__(self, tokens=3, heads=4, kv_heads=2, head_dim=64, dtype=torch.float32,
                 cache_dtype=None, block_size=16, rotary=None, seed=0):  # fmt: skip
        self.generator = torch.Generator().manual_seed(seed)
        fused = self.normal(tokens, heads + 2 * kv_heads, head_dim) * 2
        fused = fused.to(dtype).to(DEVICE)
        self.q, self.k, self.v = fused.split([heads, kv_heads, kv_heads], dim=1)
        shape = (5, 2, 2, kv_heads, block_size, head_dim)
        pool = torch.full(shape, float("nan")).to(cache_dtype or dtype).to(DEVICE)
        self.k_cache, self.v_cache = pool[:, 1, 0], pool[:, 1, 1]
        slots = torch.randperm(5 * block_size, generator=self.generator)[:tokens]
        slots[tokens // 2 : tokens // 2 + 1] = -1
        self.slots = slots.to(DEVICE)
        rotary = head_dim if rotary is None else rotary
        self.tables = {}
        if rotary:
            self.tables = dict(
                positions=torch.randint(0, 50, (tokens,), generator=self.generator).to(DEVICE),
                # Any table is allowed: the halves may differ, and cos^2 + sin^2 need not be 1.
                cos=self.normal(50, rotary).to(DEVICE),
                sin=self.normal(50, rotary).to(DEVICE),
            )

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.generator)

    def write(self, **options):
        out = torch.empty_like(self.q, memory_format=torch.contiguous_format)
        options = self.tables | dict(q_out=out) | options
        return write_kv(self.q, self.k, self.v, self.k_cache, self.v_cache, self.slots, **options)

    def expected(self, q_norm=None, k_norm=None, gemma=False, k_scale=None, v_scale=None):
        """(q, k cache, v cache) of the reference, the caches in float32."""
        q, k, v = self.q, self.k, self.v.float()
        if q_norm is not None:
            q, k = (
                reference.rms_norm(x, w, 1e-6, gemma=gemma) for x, w in ((q, q_norm), (k, k_norm))
            )
        if self.tables:
            q, k = (reference.rotate(x, **self.tables) for x in (q, k))
        caches = []
        for x, scale in ((k, k_scale), (v, v_scale)):
            if self.k_cache.dtype == FP8:
                scale = torch.ones(x.shape[1], device=DEVICE) if scale is None else scale
                x = reference.quantise_e4m3(x, scale).float()
            cache = torch.full(self.k_cache.shape, float("nan"), device=DEVICE)
            reference.write_slots(cache, x, self.slots)
            caches.append(cache)
        return q.float(), *caches


def assert_same(got, expected, dtype):
    tolerance = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
    torch.testing.assert_close(
        got.float(), expected, rtol=tolerance, atol=tolerance * 2, equal_nan=True
    )


@settings(max_examples=25)
@given(data=st.data())
def test_write_is_the_reference_and_touches_nothing_else(data):
    dtype = data.draw(st.sampled_from(FLOATS))
    head_dim = data.draw(st.sampled_from(HEAD_DIMS))
    rotary = data.draw(st.sampled_from([0, 2, head_dim // 2, head_dim - 16, head_dim]))
    kv_heads, group = data.draw(st.sampled_from([(1, 16), (2, 1), (3, 5), (9, 1), (2, 7)]))
    step = Step(
        tokens=data.draw(st.integers(0, 3)), heads=kv_heads * group, kv_heads=kv_heads, head_dim=head_dim,
        dtype=dtype, block_size=data.draw(st.sampled_from([16, 64])), rotary=rotary,
    )  # fmt: skip
    options = {}
    if data.draw(st.booleans()):
        options = dict(q_norm=step.normal(head_dim).to(dtype).to(DEVICE),
                       k_norm=step.normal(head_dim).to(dtype).to(DEVICE), gemma=data.draw(st.booleans()))  # fmt: skip
    q, k_cache, v_cache = step.expected(**options)
    assert_same(step.write(**options), q, dtype)
    assert_same(step.k_cache, k_cache, dtype)
    assert_same(step.v_cache, v_cache, dtype)


def test_in_place_is_the_same_and_leaves_k_and_v():
    step = Step(tokens=4, heads=12, kv_heads=3, dtype=torch.bfloat16)
    expected, k, v = step.write(), step.k.clone(), step.v.clone()
    assert step.write(q_out=step.q) is step.q
    assert torch.equal(step.q, expected)
    assert torch.equal(step.k, k) and torch.equal(step.v, v)


def test_transformers_llama_tables_give_its_rotation():
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    from transformers import LlamaConfig

    step = Step(tokens=5, head_dim=64)
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        rope_parameters=dict(rope_type="yarn", factor=4.0, rope_theta=1e4, original_max_position_embeddings=16),
        max_position_embeddings=64,
    )  # fmt: skip
    rope = modeling.LlamaRotaryEmbedding(config).to(DEVICE)
    cos, sin = (x[0] for x in rope(step.q, torch.arange(50, device=DEVICE)[None]))
    assert cos.max() > 1.01  # the attention factor is in the tables
    positions = step.tables["positions"]
    expected, _ = modeling.apply_rotary_pos_emb(
        step.q[None], step.k[None], cos[positions][None], sin[positions][None], unsqueeze_dim=2
    )
    got = step.write(cos=cos.contiguous(), sin=sin.contiguous())
    torch.testing.assert_close(got, expected[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", FLOATS)
def test_fp8_bytes_equal_torch(dtype):
    # Without a rotation the input of the conversion is exact: every byte must agree.
    step = Step(tokens=5, kv_heads=2, head_dim=128, dtype=dtype, cache_dtype=FP8, rotary=0)
    scale = torch.tensor([0.37, 2.0**-9], device=DEVICE)
    edges = torch.tensor([0.0, -0.0, 2.0**-10, 2.0**-9, 3 * 2.0**-10, 2.0**-6, 447.0, 448.0, 464.0, 465.0,
                          float("inf"), -float("inf"), float("nan"), 17.0, 19.0, -1.0625, 1e-30])  # fmt: skip
    step.v[:, :, : len(edges)] = edges.to(dtype).to(DEVICE)
    step.v[:, 1, 20:] = (2.0 ** torch.linspace(-22, 4, 108)).to(dtype).to(DEVICE)
    for scales in ({}, dict(k_scale=scale, v_scale=scale)):
        step.write(**scales)
        for cache, x in ((step.k_cache, step.k), (step.v_cache, step.v)):
            expected = torch.full_like(cache, float("nan"), dtype=torch.float32).to(FP8)
            used = scales.get("k_scale", torch.ones(2, device=DEVICE))
            codes = reference.quantise_e4m3(x, used).view(torch.uint8)
            reference.write_slots(expected.view(torch.uint8), codes, step.slots)
            same = expected.view(torch.uint8) == cache.view(torch.uint8)
            assert (same | (expected.float().isnan() & cache.float().isnan())).all()


def test_fp8_with_rotation_and_norm_is_near_the_reference():
    step = Step(tokens=6, dtype=torch.float32, cache_dtype=FP8)
    weights = dict(q_norm=step.normal(64).to(DEVICE), k_norm=step.normal(64).to(DEVICE))
    scales = dict(
        k_scale=torch.tensor([0.5, 0.02], device=DEVICE),
        v_scale=torch.tensor([1.0, 0.1], device=DEVICE),
    )
    _, k_cache, v_cache = step.expected(**weights, **scales)
    step.write(**weights, **scales)
    # A number close to a rounding boundary may be rounded the other way: one step of 2^-3.
    torch.testing.assert_close(
        step.k_cache.float(), k_cache, rtol=0.13, atol=2.0**-9, equal_nan=True
    )
    assert torch.equal(step.v_cache.float().nan_to_num(7), v_cache.nan_to_num(7))


def test_foreign_slots_are_not_written_and_foreign_positions_give_nan():
    step = Step(tokens=4)
    step.slots[:] = torch.tensor([0, 5 * 16, -7, 2**40])
    step.tables["positions"][:] = torch.tensor([50, 3, -1, 4])
    q = step.write()
    assert q[[0, 2]].isnan().all() and torch.isfinite(q[[1, 3]]).all()
    assert step.k_cache.isnan().all()
    assert step.v_cache[0, :, 0].isfinite().all() and step.v_cache.isfinite().sum() == 2 * 64


def test_a_token_does_not_depend_on_the_batch():
    step = Step(tokens=5, dtype=torch.bfloat16)
    weights = dict(q_norm=step.normal(64).to(DEVICE), k_norm=step.normal(64).to(DEVICE))
    q = step.write(**weights)
    whole = step.k_cache.clone()
    for token in range(5):
        alone = Step(tokens=5, dtype=torch.bfloat16)
        for name in ("q", "k", "v", "slots"):
            setattr(alone, name, getattr(step, name)[token : token + 1])
        alone.tables = step.tables | dict(positions=step.tables["positions"][token : token + 1])
        assert torch.equal(alone.write(**weights)[0], q[token])
        slot = int(step.slots[token])
        if slot >= 0:
            assert torch.equal(
                alone.k_cache[slot // 16, :, slot % 16], whole[slot // 16, :, slot % 16]
            )


def test_bad_arguments_are_named():
    step = Step()
    vector = torch.ones(2, device=DEVICE)
    for change, message in (
        (dict(positions=None), "positions, cos, sin: must be given together"),
        (
            dict(cos=step.tables["cos"][:, :7], sin=step.tables["sin"][:, :7]),
            "rotary_dim: must be even, got 7",
        ),
        (dict(sin=step.tables["sin"][:40]), r"sin: must have shape \[50, 64\]"),
        (dict(q_norm=torch.ones(64, device=DEVICE)), "q_norm, k_norm: must be given together"),
        (
            dict(k_scale=vector, v_scale=vector),
            "k_cache, with scales: must be one of float8_e4m3fn",
        ),
        (
            dict(q_out=torch.zeros(1, device=DEVICE)),
            r"q_out: must have shape \[3, 4, 64\], got \[1\]",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            step.write(**change)
    for name, value, message in (
        ("slots", step.slots.int(), "slots: must be one of int64, got torch.int32"),
        ("k", step.k[:, :1], r"k_cache: must be \[blocks, 1, block_size, 64\]"),
        ("v_cache", step.v_cache.mT.contiguous().mT, "v_cache: blocks must be contiguous"),
        ("k_cache", step.k_cache.half(), "k_cache: must be one of float32, float8_e4m3fn"),
        ("q", step.q[:, :3], "num_heads: must be 1 to 128 times num_kv_heads=2, got 3"),
    ):
        other = Step()
        setattr(other, name, value)
        if name == "k":
            other.v = other.v[:, :1]
        with pytest.raises(ValueError, match=message):
            other.write()
