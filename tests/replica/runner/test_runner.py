"""The runner: warm-up, copies, partial steps, compile counter."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import model_zoo
import numpy as np
import pytest
import torch
from step_driver import Driver, engine_config, make_runner
from torch.utils._python_dispatch import TorchDispatchMode

from quire.kernels.cpu.cpu_attention import paged_attention
from quire.kernels.cpu.cpu_lm_head import NormedProduct
from quire.replica.checkpoint.model_spec import ModelSpec
from quire.replica.device import cpu_prefault
from quire.replica.device.kv_pool import KVPool
from quire.replica.kv_cache.groups import LayerGroup
from quire.replica.runner.runner import Runner
from tests.kernels import reference


@pytest.fixture(scope="module")
def runner(zoo):
    return make_runner(zoo("llama"))


@pytest.fixture(autouse=True)
def poisoned(runner):
    runner.pool.poison()


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 173, length).tolist()


def test_run_gives_the_argmax_of_the_logits_and_a_duration(runner):
    driver = Driver(runner)
    sequences = [driver.add(prompt(n, n), 1) for n in (20, 3)]
    plan, _ = driver.plan([(s, len(s.tokens)) for s in sequences])
    result = runner.run(plan)
    assert result.token_ids.dtype == np.int64
    assert result.token_ids.tolist() == runner.forward(plan).argmax(-1).tolist()
    assert result.duration_s > 0


def test_copies_between_the_tiers_are_no_work_of_the_step(runner, monkeypatch):
    """Otherwise the tokens of a prompt whose blocks are restored would seem slow, and others get few of them."""
    move = runner.host_pool.move

    def slow_move(*args, **options):
        time.sleep(1.0)
        move(*args, **options)

    monkeypatch.setattr(runner.host_pool, "move", slow_move)
    driver = Driver(runner)
    sequence = driver.add(prompt(20), 1)
    plan, _ = driver.plan([(sequence, len(sequence.tokens))])
    began_s = time.monotonic()
    result = runner.run(plan)
    assert result.duration_s < time.monotonic() - began_s - 0.9


def test_a_step_that_samples_nothing_only_fills_the_cache(runner):
    driver = Driver(runner)
    sequence = driver.add(prompt(20), 1)
    plan, sampling = driver.plan([(sequence, 11)])
    assert not sampling
    assert runner.run(plan).token_ids.shape == (0,)
    written = torch.isfinite(runner.pool.group_view(0)).all(-1)[:, 0, 0, 0]  # [blocks, block_size]
    assert int(written.sum()) == 11


class SlowMask:
    """A grammar whose mask is filled only once the forward pass has begun, which waits for it to be asked."""

    def __init__(self, vocab_size: int, allowed: int):
        self.asked, self.forward_began = threading.Event(), threading.Event()
        self.packed = np.zeros(-(-vocab_size // 32), np.int32)
        self.packed[allowed // 32] = 1 << allowed % 32

    def mask(self) -> np.ndarray:
        self.asked.set()
        assert self.forward_began.wait(10)
        return self.packed


def test_grammar_masks_are_filled_while_the_forward_pass_runs(runner):
    grammar = SlowMask(runner.config.vocab_size, allowed=5)

    def meet(*_: object) -> None:
        grammar.forward_began.set()
        assert grammar.asked.wait(10)

    driver = Driver(runner)
    plan, _ = driver.plan([(driver.add(prompt(9), 1), 9)])
    columns = plan.sampling._replace(grammars=((0, grammar),))
    hook = runner.model.model.embed_tokens.register_forward_pre_hook(meet)
    try:
        result = runner.run(plan._replace(sampling=columns))
    finally:
        hook.remove()
    assert result.token_ids.tolist() == [5]


def test_only_rows_that_sample_reach_the_lm_head(runner, monkeypatch):
    seen = []
    head, fused = runner.model.lm_head, NormedProduct.__call__

    def multiply(x, forward=head.forward):
        seen.append(x.shape[-2])
        return forward(x)

    def norm_and_multiply(self, x, workspace):
        seen.append(len(x))
        return fused(self, x, workspace)

    monkeypatch.setattr(head, "forward", multiply)
    monkeypatch.setattr(NormedProduct, "__call__", norm_and_multiply)
    driver = Driver(runner)
    done, partial = driver.add(prompt(9), 1), driver.add(prompt(30), 1)
    plan, _ = driver.plan([(done, 9), (partial, 12)])
    runner.run(plan)
    assert seen == [1]


class Questions(TorchDispatchMode):
    """Notes what makes the host wait for a device: a number's value, or a result whose size depends on values."""

    # In inference mode what is composed of others arrives whole.
    WAITING = (
        *("item", "is_nonzero", "_local_scalar_dense", "equal", "allclose"),
        *("nonzero", "where", "masked_select", "unique", "_unique2", "unique_consecutive"),
    )

    def __init__(self):
        super().__init__()
        self.asked: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket._qualified_op_name.removeprefix("aten::")
        if name in self.WAITING and (name != "where" or len(args) == 1):
            self.asked.append(str(func))
        return func(*args, **(kwargs or {}))


DENSE = [name for name in model_zoo.NAMES if name not in ("qwen3_moe", "gpt_oss")]


@pytest.mark.parametrize("name", DENSE)
def test_a_forward_pass_asks_the_device_nothing(zoo, name):
    """Else the host would wait for the step before it, and no graph could hold the pass.

    Unfused: the CPU's own embedding looks at the ids that it is given.
    """
    runner = make_runner(zoo(name), fuse="off")
    driver = Driver(runner)
    plan, _ = driver.plan([(driver.add(prompt(n, n), 1), n) for n in (20, 1, 7)])
    with Questions() as questions:
        runner.forward(plan)
    assert questions.asked == []


def test_a_step_writes_its_own_slots_and_nothing_else(runner):
    driver = Driver(runner)
    sequence = driver.add(prompt(20), 1)
    plan, _ = driver.plan([(sequence, 20)])
    runner.run(plan)
    size = runner.config.block_size
    finite = torch.isfinite(runner.pool.group_view(0)).all(
        -1
    )  # [blocks, layers, 2, heads, block_size]
    expected = torch.zeros(len(finite), size, dtype=torch.bool)
    expected.view(-1)[torch.from_numpy(plan.slots[0])] = True
    assert torch.equal(finite, expected[:, None, None, None, :].expand_as(finite))


def test_copies_happen_before_the_step(runner):
    """A fork: the second sequence's last block is a copy, then both write to their own."""
    driver = Driver(runner)
    first = driver.add(prompt(20), 4)
    driver.advance([(first, 20)])
    fork = driver.add(first.tokens, 4)
    fork.computed = 20
    fork.blocks[0, 0] = first.blocks[0, 0]
    plan, _ = driver.plan([(fork, 1)])
    plan = plan._replace(copies=((int(first.blocks[0, 1]), int(fork.blocks[0, 1])),))
    forked = runner.run(plan).token_ids
    driver.advance([(first, 1)])
    assert forked[0] == first.tokens[-1]


def test_warm_up_touches_only_the_trash_block(runner):
    runner.warm_up()
    pool = runner.pool
    assert torch.isnan(pool.data[: pool.num_blocks]).all()
    assert torch.isfinite(pool.data[pool.trash_block]).any()


@pytest.mark.parametrize("most_tokens", [16, 64])
def test_a_processor_warms_up_with_short_steps(zoo, monkeypatch, most_tokens):
    """Larger ones would only delay the start: nothing is compiled for their sizes."""
    budget = most_tokens if most_tokens < 64 else 256
    runner = make_runner(zoo("llama"), max_batch_tokens=budget, max_model_len=256)
    lengths, run = [], runner.run
    monkeypatch.setattr(
        runner, "run", lambda plan: (lengths.append(len(plan.token_ids)), run(plan))
    )
    runner.warm_up()
    assert max(lengths) == most_tokens


def test_num_compiles_counts_what_is_built_after_ready(zoo):
    runner = make_runner(zoo("llama"))
    runner.warm_up()
    runner.mark_ready()
    driver = Driver(runner)
    driver.generate([driver.add(prompt(40), 3, temperature=1.0)], 3, chunk=16)
    assert runner.num_compiles == 0
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert runner.num_compiles == 1


def test_num_compiles_counts_triton_kernels(zoo, monkeypatch):
    knobs = pytest.importorskip("triton.knobs")
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", None)
    runner = make_runner(zoo("llama"))
    runner.mark_ready()
    knobs.runtime.jit_post_compile_hook(key="k", repr="kernel")
    assert runner.num_compiles == 1


def test_counting_kernels_does_not_keep_a_runner_that_is_gone(zoo, monkeypatch):
    """Triton keeps the hook, and a runner has the weights."""
    knobs = pytest.importorskip("triton.knobs")
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", None)
    runner = make_runner(zoo("llama"))
    runner.mark_ready()
    gone = weakref.ref(runner)
    del runner
    gc.collect()
    assert gone() is None


def test_deterministic_needs_float32(zoo):
    with pytest.raises(ValueError, match="deterministic: true needs float32"):
        make_runner(zoo("llama"), dtype="bfloat16")


def test_threads_are_set_once(zoo):
    before = torch.get_num_threads()
    try:
        make_runner(zoo("llama"), num_threads=2, deterministic=False)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_from_config_allocates_what_the_config_says(zoo):
    spec = ModelSpec.from_checkpoint(zoo("qwen3"))
    runner = Runner.from_config(engine_config(spec, num_blocks=5, block_size=8), spec)
    assert runner.pool.group_view(0).shape == (6, 3, 2, 2, 8, 32)


def test_an_unused_pool_costs_no_memory():
    def resident_bytes() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    before = resident_bytes()
    pool = KVPool(
        4096, [LayerGroup(tuple(range(8)), num_kv_heads=8, head_dim=64)], 32, torch.float32
    )
    assert pool.data.numel() * 4 > 4 << 30
    pool.data[17].fill_(1.0)
    assert resident_bytes() - before < 64 << 20
    assert float(pool.data[16].sum()) == 0.0


def test_an_idle_runner_backs_its_pool_and_keeps_what_is_written(zoo):
    spec = ModelSpec.from_checkpoint(zoo("qwen3"))
    runner = Runner.from_config(engine_config(spec, num_blocks=4000, block_size=16), spec)
    pool = runner.pool
    pool.data[3].fill_(2.0)
    assert runner.steps.prefault.unbacked_bytes > 2 * cpu_prefault.CHUNK_BYTES
    runner.warm_up()
    assert not runner.use_idle()  # what it does needs no turn of the loop
    assert runner.steps.prefault.join(60)
    assert runner.steps.prefault.unbacked_bytes == 0
    assert (pool.data[3] == 2.0).all() and not pool.data[4].any()


def test_a_running_engine_backs_nothing(zoo, monkeypatch):
    spec = ModelSpec.from_checkpoint(zoo("qwen3"))
    runner = Runner.from_config(engine_config(spec, num_blocks=4000, block_size=16), spec)
    took_chunk = threading.Event()
    take, back = threading.Event(), runner.steps.prefault.back_next

    def back_one(num_bytes):
        took_chunk.set()
        take.wait(60)
        back(num_bytes)

    monkeypatch.setattr(runner.steps.prefault, "back_next", back_one)
    runner.use_idle()
    assert took_chunk.wait(60)
    runner.warm_up()  # steps: the chunk that has begun is the last
    left = runner.steps.prefault.unbacked_bytes
    take.set()
    assert not runner.steps.prefault.join(0.5)
    assert left - 2 * cpu_prefault.CHUNK_BYTES < runner.steps.prefault.unbacked_bytes < left
    runner.use_idle()
    assert runner.steps.prefault.join(60)
    assert runner.steps.prefault.unbacked_bytes == 0


def test_a_runner_leaves_scarce_memory_to_others(zoo, monkeypatch):
    spec = ModelSpec.from_checkpoint(zoo("qwen3"))
    config = engine_config(spec, num_blocks=500, block_size=16)
    runner = Runner.from_config(config, spec)
    left = runner.steps.prefault.unbacked_bytes
    monkeypatch.setattr(cpu_prefault, "available_bytes", lambda device: 2 * left - 1)
    runner.use_idle()
    assert runner.steps.prefault.join(60)
    assert runner.steps.prefault.unbacked_bytes == left
    monkeypatch.setattr(cpu_prefault, "available_bytes", lambda device: 2 * left)
    runner = Runner.from_config(config, spec)
    runner.use_idle()
    assert runner.steps.prefault.join(60)
    assert runner.steps.prefault.unbacked_bytes == 0


def test_a_closed_runner_has_no_thread(zoo, monkeypatch):
    spec = ModelSpec.from_checkpoint(zoo("qwen3"))
    runner = Runner.from_config(engine_config(spec, num_blocks=4000, block_size=16), spec)
    monkeypatch.setattr(cpu_prefault, "CHUNK_BYTES", 4096)  # it has hundreds of turns left
    runner.use_idle()
    runner.close()
    assert runner.steps.prefault.join(0)
    left = runner.steps.prefault.unbacked_bytes
    assert left
    runner.use_idle()
    assert runner.steps.prefault.join(0)
    assert runner.steps.prefault.unbacked_bytes == left


def test_backing_ends_with_its_pool(monkeypatch):
    monkeypatch.setattr(cpu_prefault, "_POLL_S", 0.01)
    pool = KVPool(
        500, [LayerGroup(tuple(range(4)), num_kv_heads=8, head_dim=64)], 16, torch.float32
    )
    backing = cpu_prefault.PoolPrefault(pool)
    backing.allow()
    backing.forbid()
    del pool
    assert backing.join(60)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write_puts_tokens_into_their_slots(dtype):
    pool = KVPool(4, [LayerGroup((0, 1, 2), num_kv_heads=2, head_dim=16)], 8, dtype)
    slots = torch.tensor([0, 9, 31, 17])
    k, v = torch.randn(2, 4, 2, 16).to(dtype)
    pool.write(1, k, v, pool.rows_of(0, slots))
    for i, slot in enumerate(slots.tolist()):
        assert torch.equal(pool.keys(1)[slot // 8, :, slot % 8], k[i])
        assert torch.equal(pool.values(1)[slot // 8, :, slot % 8], v[i])
    view = pool.group_view(0)
    assert not view[:, [0, 2]].any()
    assert int((view != 0).any(-1).sum()) == 4 * 2 * 2


def test_groups_of_different_shapes_share_blocks_of_equal_bytes():
    """Two heads of 24 in three layers, one of 32 in two: each group writes its own blocks and reads them."""
    groups = [
        LayerGroup((1, 3, 4), num_kv_heads=2, head_dim=24),
        LayerGroup((0, 2), num_kv_heads=1, head_dim=32, window=16),
    ]
    pool = KVPool(6, groups, 8, torch.float32)
    assert pool.data.shape == (7, 768 * 3)  # 3 * 2 * 2 * 8 * 24 elements, a multiple of 8 * 96
    pool.poison()
    blocks = {0: [4, 1], 1: [0, 5]}
    written = {}
    for layer in range(5):
        g = pool.group_of(layer)
        slots = torch.tensor([blocks[g][0] * 8 + 7, blocks[g][1] * 8])
        k, v = torch.randn(2, 2, groups[g].num_kv_heads, groups[g].head_dim)
        pool.write(layer, k, v, pool.rows_of(g, slots))
        written[layer] = (g, k, v)
    for layer, (g, k, v) in written.items():
        for cache, x in ((pool.keys(layer), k), (pool.values(layer), v)):
            assert torch.equal(cache[blocks[g][0], :, 7], x[0])
            assert torch.equal(cache[blocks[g][1], :, 0], x[1])
    assert torch.isnan(pool.data[[2, 3, 6]]).all()
    num_written = sum(
        2 * 2 * group.num_kv_heads * group.head_dim * len(group.layers) for group in groups
    )
    assert int(torch.isfinite(pool.data).sum()) == num_written
    q = torch.randn(1, 4, 32)
    table = np.array([[0, 5]])
    out = paged_attention(
        q, pool.keys(2), pool.values(2), table, np.array([0, 1]), np.array([9]), 1.0, window=2
    )
    expected = reference.paged_attention(
        q, pool.keys(2), pool.values(2), torch.from_numpy(table), [0, 1], [9], 1.0, window=2
    )
    torch.testing.assert_close(out, expected)


def test_a_layer_that_reads_another_has_its_pages_and_scales():
    """The block is as large as that of the stored layers alone."""
    shape = dict(num_kv_heads=2, head_dim=16)
    group = LayerGroup((0, 2), readers=((3, 2), (4, 0)), **shape)
    scales = {2: (torch.tensor([2.0, 3.0]), torch.tensor([4.0, 5.0]))}
    pool = KVPool(3, [group], 8, torch.float8_e4m3fn, scales=scales)
    assert (
        pool.data.shape[1] == KVPool(3, [LayerGroup((0, 2), **shape)], 8, torch.int8).data.shape[1]
    )
    for layer, source in group.readers:
        assert pool.stores(source) and not pool.stores(layer)
        assert pool.group_of(layer) == pool.group_of(source)
        assert pool.keys(layer).data_ptr() == pool.keys(source).data_ptr()
        assert pool.values(layer).data_ptr() == pool.values(source).data_ptr()
        assert pool.scales(layer) is pool.scales(source)


def test_copy_blocks_runs_in_order():
    pool = KVPool(3, [LayerGroup((0,), num_kv_heads=1, head_dim=16)], 8, torch.float32)
    pool.data[0] = 1.0
    pool.copy_blocks([(0, 1), (1, 2)])
    assert (pool.data[:3] == 1.0).all() and not pool.data[3].any()
