"""`TensorMeta` behaves like its tensor, and calls with the same metadata are not checked again."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.attention import attention_call
from quire.kernels.attention.attention_decode import decode_attention
from quire.kernels.attention.decode_plan import allocate_decode_workspace, plan_decode
from quire.kernels.rows import activation, kv_write, norm
from quire.kernels.tensor_meta import meta_of
from tests.kernels.compile.interpreter import kernel_device

DEVICE = kernel_device()

VIEWS = [
    torch.zeros(()),
    torch.zeros(5),
    torch.zeros(5)[::2],
    torch.zeros(3, 4),
    torch.zeros(3, 4).T,
    torch.zeros(3, 4)[:, :2],
    torch.zeros(1, 4)[:, :2],
    torch.zeros(1, 4).T,
    torch.zeros(0, 4).T,
    torch.zeros(2, 3, 4).half().transpose(0, 1),
]


@pytest.mark.parametrize("x", VIEWS, ids=lambda x: f"{tuple(x.shape)}-{x.stride()}")
def test_it_reads_like_its_tensor(x):
    meta = meta_of(x)
    assert (meta.shape, meta.stride(), meta.dtype, meta.device) == (
        *(x.shape, x.stride(), x.dtype, x.device),
    )
    assert (meta.dim(), meta.numel(), meta.is_contiguous()) == (
        *(x.dim(), x.numel(), x.is_contiguous()),
    )
    assert [meta.stride(i) for i in range(x.dim())] == list(x.stride())
    assert meta_of(None) is None


def normal(*shape):
    return torch.randn(shape, device=DEVICE)


def calls():
    """For each wrapper: its memoised check, a call, one with other metadata, and one that must fail."""
    x, weight, gate_up = normal(3, 64), normal(64), normal(3, 64)
    q, k, cache = normal(2, 2, 64), normal(2, 1, 64), normal(4, 2, 1, 16, 64)
    slots = torch.arange(2, device=DEVICE)

    def write(**changed):
        own = dict(q=q, k=k, v=k, k_cache=cache[:, 0], v_cache=cache[:, 1], slots=slots)
        kv_write.write_kv(**{**own, **changed})

    workspace = allocate_decode_workspace(2, 4, 2, 1, 64, DEVICE, dtype=torch.float32)
    ids = dict(dtype=torch.int32, device=DEVICE)
    tables = torch.tensor([[0], [1]], **ids)
    lengths = torch.tensor([0, 1, 2], **ids), torch.tensor([3, 16], **ids)
    plan = plan_decode(workspace, *lengths, tables, 16)

    def attend(q=q, **options):
        decode_attention(q, cache[:, 0], cache[:, 1], tables, 0.1, plan, **options)

    return {
        "norm": (
            norm._checked,
            lambda: norm.rms_norm(x, weight, 1e-6),
            lambda: norm.rms_norm(x[:2], weight, 1e-6),
            lambda: norm.rms_norm(x, weight[:-1], 1e-6),
        ),
        "activation": (
            activation._checked,
            lambda: activation.silu_mul(gate_up),
            lambda: activation.silu_mul(gate_up[:, :32]),
            lambda: activation.silu_mul(gate_up[:, :33]),
        ),
        "kv_write": (
            kv_write._checked,
            write,
            lambda: write(q_out=normal(2, 4, 64)[:, :2]),
            lambda: write(slots=slots.int()),
        ),
        "attention": (
            attention_call._checked,
            attend,
            lambda: attend(sinks=weight[:2]),
            lambda: attend(sinks=weight[:3]),
        ),
    }


@pytest.mark.parametrize("name", ["norm", "activation", "kv_write", "attention"])
def test_equal_calls_are_checked_once_and_wrong_ones_each_time(name):
    checked, call, other, wrong = calls()[name]
    checked.cache_clear()
    for _ in range(3):
        call()
    assert checked.cache_info()[:2] == (2, 1)  # hits, misses
    other()
    call()
    assert checked.cache_info()[:2] == (3, 2)
    messages = set()
    for _ in range(2):
        with pytest.raises(ValueError) as error:
            wrong()
        messages.add(str(error.value))
    assert len(messages) == 1
    assert checked.cache_info()[:2] == (3, 4)
