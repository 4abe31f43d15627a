"""A replica of several ranks generates what one rank generates, bit for bit, on every way through its memory.

Ranks are threads of this process, with their own sockets, process groups and parts of the weights; the last tests start
real processes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_zoo import NAMES, build_proven
from rank_engines import (
    FEW_BLOCKS,
    LENGTHS,
    SHARED,
    STEP_TOKENS,
    engine,
    of_one_rank,
    params,
    prompts,
    told,
)
from safetensors.torch import load_file

from quire.protos.errors import EngineError
from quire.replica.checkpoint.model_spec import CheckpointError, ModelSpec
from quire.replica.config import EngineArgs, SizingError
from quire.replica.core.request import Request
from quire.replica.core.sampling_record import RECORD
from quire.replica.core.step_plan import BlockTables, PromptTargets, SamplingBatch, StepPlan
from quire.replica.engine import Engine
from quire.replica.kv_cache import publishing
from quire.replica.loop import LoopOutput
from quire.replica.model.sharded.rank_group import tree_sum
from quire.replica.model.stored.weights import list_tensors, read_tensors
from quire.replica.node_pool.pool_file import PoolPlace
from quire.replica.ranks import following_rank
from quire.replica.ranks.following_rank import follow
from quire.replica.ranks.rank_links import RankEnd
from quire.replica.ranks.rank_runners import FollowingRunner
from quire.replica.ranks.step_message import decode, encode
from quire.replica.startup.rank_sizing import rank_spec


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [
        ("llama", 2),
        ("llama", 4),  # twice as many ranks as KV heads
        ("llama_tied", 2),
        ("qwen2_mixed", 2),  # biases, windows
        ("phi3", 2),  # the plan gathers outputs
        ("qwen3_moe", 2),
    ],
)
def test_ranks_generate_the_bits_of_one(zoo, name, num_ranks):
    """In chunks of a prompt, in a batch, with prefix hits, greedy and sampled, with log-probabilities of the prompt."""
    folder = zoo(name)
    expected, scored, forked = of_one_rank(folder, num_ranks)
    with engine(folder, num_ranks, num_ranks) as ranks:
        outputs = ranks.generate(prompts(), params())
        assert told(outputs) == expected
        again = ranks.generate(prompts(), params())
        assert told(again) == expected
        assert again[-1].num_cached_tokens >= SHARED
        assert told(ranks.generate(prompts(), params(prompt_logprobs=2))) == scored
        assert told(ranks.generate(prompts(), params(), n=2)) == forked
        ranks.check()


def test_ranks_on_a_cpu_plan_a_step_ahead(zoo):
    """With `async_batching`, also for rows whose sampling waits for their token in the step in flight."""
    folder = zoo("llama")
    expected, scored, forked = of_one_rank(folder, 2)
    waits = params(stop_token_ids=(3, 5, 9), min_tokens=4)
    with engine(folder, 1, 2) as alone:
        waited = told(alone.generate(prompts(), waits))
    with engine(folder, 2, 2, async_batching="on") as ranks:
        assert ranks.config.plans_ahead
        for _ in range(2):
            assert told(ranks.generate(prompts(), params())) == expected
        assert told(ranks.generate(prompts(), params(prompt_logprobs=2))) == scored
        assert told(ranks.generate(prompts(), params(), n=2)) == forked
        assert told(ranks.generate(prompts(), waits)) == waited
        ranks.check()


@pytest.mark.parametrize("restore", ["auto", "always"])
def test_blocks_of_all_ranks_are_preempted_and_restored_alike(zoo, restore):
    """Too few blocks for all requests: they are computed again, or copied to the host tier of each rank and back."""
    folder = zoo("llama")
    expected, *_ = of_one_rank(folder, 2)
    tier = dict(node_pool_gib=0.001) if restore == "always" else {}
    with engine(
        folder, 2, 2, num_blocks=FEW_BLOCKS, safety_margin=0.0, restore=restore, **tier
    ) as ranks:
        assert told(ranks.generate(prompts(), params())) == expected
        assert ranks.load().num_preemptions > 0
        num_restored = ranks.telemetry()["tiers"]["num_restored"]
        assert (num_restored > 0) == (restore == "always")
        ranks.check()


def test_ranks_share_the_pool_of_the_node(zoo, tmp_path):
    """What one replica has computed another restores, every rank its part. One damaged part spoils the block."""
    folder = zoo("llama")
    expected, *_ = of_one_rank(folder, 2)
    pool = dict(node_pool=PoolPlace("ranks", folder=tmp_path), node_pool_gib=0.001)

    def tokens_on_host(ranks: Engine) -> int:
        assert told(ranks.generate(prompts(), params())) == expected
        ranks.check()
        return ranks.snapshot()["prefix"]["tokens_hit_on_host"]

    with engine(folder, 2, 2, **pool) as first:
        assert told(first.generate(prompts(), params())) == expected
        end_s = time.monotonic() + 60
        while first.call(lambda scheduler: len(scheduler.memory.publishing)).result():
            assert time.monotonic() < end_s
            time.sleep(0.01)
        (file,) = tmp_path.iterdir()
        slot_bytes = int(file.name.rpartition("x")[2])
        with engine(folder, 1, 2, **pool) as alone:
            # Its slots are as long, and have the heads in another order.
            assert alone._node_pool.layout.slot_bytes == slot_bytes
            assert tokens_on_host(alone) == 0
        with engine(folder, 2, 2, **pool) as second:
            whole_blocks = sum((n - 1) // 8 * 8 for n in LENGTHS)
            # The shared prefix is restored once.
            assert tokens_on_host(second) >= whole_blocks - SHARED
            assert second.snapshot()["prefix"]["tokens_hit"] == whole_blocks
            second._node_pool.slots[:, slot_bytes // 2 :] ^= 1
        with engine(folder, 2, 2, **pool) as third:
            assert tokens_on_host(third) == 0
            assert third.snapshot()["host_blocks"]["damaged"] > 0
    assert not list(tmp_path.iterdir()), "the last replica removes the pool"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_family_has_the_bits_of_one_rank(zoo, tmp_path, name):
    """In chunks, with prefix hits, forks, preemption, drafts, and a host tier in the pool that outlives the replica."""
    folder = zoo(name)
    num_groups = len(ModelSpec.from_checkpoint(folder).groups)
    expected, scored, forked = of_one_rank(folder, 2)
    options: dict[str, Any] = dict(
        node_pool=PoolPlace("family", folder=tmp_path),
        node_pool_gib=0.002,
        num_blocks=FEW_BLOCKS * num_groups,
        safety_margin=0.0,
        restore="always",
        speculation=dict(method="ngram"),
    )
    with engine(folder, 2, 2, **options) as other, engine(folder, 2, 2, **options) as ranks:
        for _ in range(2):
            assert told(ranks.generate(prompts(), params())) == expected
        assert told(ranks.generate(prompts(), params(prompt_logprobs=2))) == scored
        assert told(ranks.generate(prompts(), params(), n=2)) == forked
        assert ranks.load().num_preemptions > 0
        assert ranks.telemetry()["tiers"]["num_restored"] > 0
        assert told(other.generate(prompts(), params())) == expected
        assert other.snapshot()["prefix"]["tokens_hit_on_host"] >= SHARED
        ranks.check()
        other.check()


def test_drafts_are_verified_by_all_ranks(zoo):
    """The prediction is the answer, so a step gives several tokens."""
    folder, answer, done = zoo("llama"), [], threading.Event()
    expected, *_ = of_one_rank(folder, 2)

    def on_output(output: LoopOutput) -> None:
        for delta in output.deltas:
            answer.extend(delta.token_ids)
            if delta.finish_reason is not None:
                done.set()

    with engine(folder, 2, 2, on_output, speculation=dict(method="ngram")) as ranks:
        prediction = np.array(expected[0][0], np.int32)
        ranks.submit(Request("a", prompts()[0], params()[0], prediction_ids=prediction))
        assert done.wait(60)
        assert answer == prediction.tolist()
        num_chunks = -(-LENGTHS[0] // STEP_TOKENS)
        assert ranks.telemetry()["host"]["num_steps"] < num_chunks + len(answer) / 2


def test_a_failed_rank_is_the_end_of_the_replica(zoo, monkeypatch):
    """Real processes: one is killed while requests run. They end, the engine says why, and no process remains."""
    pids: list[int] = []

    class Noted(subprocess.Popen):
        def __init__(self, command: list[str], **options: object):
            super().__init__(command, **options)
            if "following_rank" in command[2]:
                pids.append(self.pid)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    ends: list[RankEnd] = []
    args = EngineArgs(
        model=str(zoo("llama")), device="cpu", dtype="float32", num_threads=1, tensor_parallel=2
    )
    with Engine(args, prove=False) as ranks:
        ranks.watch_ranks(ends.append)
        assert told(ranks.generate(prompts(), params())) == of_one_rank(zoo("llama"), 2)[0]
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(EngineError, match="the engine failed in step"):
            ranks.generate(prompts(), params())
        deadline = time.monotonic() + 30
        while not ends and time.monotonic() < deadline:
            time.sleep(0.01)
        assert ends == [RankEnd(1, None)], "no request is to blame"
        with pytest.raises(EngineError, match="rank 1"):
            ranks.check_health()
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_a_rank_that_hangs_while_the_engine_is_idle_is_found(zoo, tmp_path, monkeypatch):
    """The copies of an idle engine to the node's pool wait for all ranks."""
    reached, over = threading.Event(), threading.Event()
    save = FollowingRunner.save_blocks

    def hang(runner: FollowingRunner, pairs: np.ndarray) -> None:
        reached.set()
        over.wait(60)
        save(runner, pairs)

    monkeypatch.setattr(FollowingRunner, "save_blocks", hang)
    # Steps publish nothing, so that all is left to the idle engine.
    monkeypatch.setattr(publishing, "_PREFILL_SHARE", 0.0)
    place = PoolPlace("hung", folder=tmp_path)
    with engine(zoo("llama"), 2, 2, node_pool=place, node_pool_gib=0.001, step_timeout_s=1.0) as e:
        e.call(lambda s: setattr(s.memory.publishing, "max_share", 1e-9)).result()
        complaints: list[str] = []
        thread = e.watch(complaints.append)
        e.generate(prompts(), params())
        try:
            assert reached.wait(30), "blocks are copied while the engine is idle"
            thread.join(30)
            assert len(complaints) == 1 and complaints[0].startswith("a save of blocks has run for")
            with pytest.raises(EngineError, match="a save of blocks"):
                e.check_health()
        finally:
            over.set()


def test_the_reason_of_a_rank_that_cannot_load_reaches_the_leader(zoo, monkeypatch):
    def start(folder: Path, rank: int) -> Callable[[], None]:
        def fail() -> None:
            with pytest.raises(SizingError):
                follow(folder, rank)

        thread = threading.Thread(target=fail, daemon=True)
        thread.start()
        return thread.join

    def refuse(*_: object) -> None:
        raise SizingError("no room")

    monkeypatch.setattr(following_rank, "resolve", refuse)
    args = EngineArgs(model=str(zoo("llama")), device="cpu", dtype="float32", tensor_parallel=2)
    with pytest.raises(EngineError, match="rank 1: SizingError: no room"):
        Engine(args, prove=False, start_rank=start)


@pytest.mark.parametrize(
    ("name", "num_ranks", "message"),
    [
        (
            "gpt2",
            2,
            "no tensor-parallel plan for model_type 'gpt2', and its modules have other names",
        ),
        ("llama", 8, "4 heads and 2 KV heads of layer 0"),
        ("qwen3_moe", 4, "rows of 40 bytes"),
        # Names of attention that are not known: GPT-J reshapes by a number of heads of its own.
        ("gpt_neo", 2, "has attention of its own"),
        ("gptj", 2, "divides h.*.attn.q_proj, and heads of this name are not served"),
    ],
)
def test_models_that_cannot_be_divided_are_refused(zoo, tmp_path, name, num_ranks, message):
    if name not in NAMES:
        build_proven(name, folder := tmp_path / name)
    else:
        folder = zoo(name)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        rank_spec(ModelSpec.from_checkpoint(folder), EngineArgs(tensor_parallel=num_ranks))


def test_a_rank_has_its_share_of_the_weights_and_of_the_heads(zoo):
    whole = ModelSpec.from_checkpoint(zoo("llama"))
    part = rank_spec(whole, EngineArgs(tensor_parallel=2))
    assert (part.num_heads, part.num_kv_heads) == (2, 1)
    assert {kind.num_kv_heads for kind in part.kv_kinds.values()} == {1}
    assert 0.5 < part.weight_share < 0.8  # the embedding is on every rank


def test_parts_of_stored_tensors_are_read_alone(zoo):
    (file,) = zoo("llama").glob("*.safetensors")
    name, values = "model.layers.0.mlp.down_proj.weight", load_file(file)
    stored = list_tensors([file])[name]
    parts = [stored.rows("rows", 3, 20), stored.columns("columns", 5, 40)]
    expected = [values[name][3:20], values[name][:, 5:40]]
    num_bytes: list[int] = []
    for dtype in (torch.float32, torch.bfloat16):  # in place, and through a staging buffer
        read = read_tensors(
            parts,
            lambda t, dtype=dtype: torch.empty(t.shape, dtype=dtype),
            on_bytes=num_bytes.append,
        )
        for (_, found), wanted in zip(read, expected, strict=True):
            assert torch.equal(found, wanted.to(dtype))
    assert sum(num_bytes) == 2 * sum(part.nbytes for part in expected)


def test_a_sum_depends_on_the_number_of_parts_only():
    parts = torch.randn(8, 100, generator=torch.Generator().manual_seed(1)) * 1e3
    whole = tree_sum(list(parts))
    for size in (1, 2, 4):
        each = [tree_sum(own) for own in parts.split(8 // size)]
        assert torch.equal(tree_sum(each), whole)
    assert not torch.equal(parts.sum(0), whole), "another order gives other bits"


def test_a_step_is_the_same_after_its_way_to_a_rank():
    index = np.array([0, 3], np.int32)
    plan = StepPlan(
        step=7,
        token_ids=np.array([-1, 5, 6, 7], np.int32),
        positions=np.arange(4, dtype=np.int32),
        cu_q=np.array([0, 1, 4], np.int32),
        num_sampled=np.array([1, 1], np.int32),
        kv_len=np.array([1, 3], np.int32),
        block_tables=BlockTables(
            np.arange(24, dtype=np.int32).reshape(2, 4, 3), np.array([2, 0]), 2
        ),
        slots=np.arange(8).reshape(2, 4),
        sampling=SamplingBatch(index, np.zeros(2, RECORD), np.array([1, 4])),
        copies=((1, 2),),
        prompts=(PromptTargets(0, 1, 2, np.array([5, 6]), 3),),
        saves=np.array([[1, 2]]),
        restores=np.array([[3, 4], [5, 6]]),
    )
    known = np.array([9, 5, 6, 7], np.int64)
    found = decode(encode(plan, known))
    assert (found.step, found.copies, found.uses_restores) == (7, ((1, 2),), True)
    np.testing.assert_array_equal(found.token_ids, known)
    for name in ("positions", "cu_q", "num_sampled", "kv_len", "slots", "saves", "restores"):
        np.testing.assert_array_equal(getattr(found, name), getattr(plan, name))
    np.testing.assert_array_equal(found.block_tables.gather(), plan.block_tables.gather())
    np.testing.assert_array_equal(found.sampling.token_index, index)
    (target,) = found.prompts
    assert (target.row, target.begin, target.start, target.num_top) == (0, 1, 2, 3)
    assert found.sampling.is_plain and found.sampling.is_greedy


def test_the_options_in_the_message_are_plain_data():
    assert json.loads(json.dumps(dataclasses.asdict(EngineArgs()))) == dataclasses.asdict(
        EngineArgs()
    )
