"""Engines that share the node's pool: what one has computed another restores, also after a SIGKILL."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pool_victim import OPTIONS, prompts_of

from quire.protos.sampling_params import SamplingParams
from quire.replica.config import EngineArgs, SizingError
from quire.replica.device.cpu_device import CpuDevice
from quire.replica.engine import Engine
from quire.replica.node_pool.pool_file import PoolFile, PoolPlace
from quire.replica.runner.runner import Runner
from quire.replica.startup.device_sizing import GIB
from quire.replica.startup.pool_place import default_pool_bytes

BLOCK_SIZE = 32
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)


def tokens_of(engine: Engine, prompts: list) -> list[list[int]]:
    return [list(o.token_ids) for o in engine.generate(prompts, GREEDY, progress=False)]


def hits(engine: Engine) -> dict[str, int]:
    return engine.snapshot()["prefix"]


def wait_until_published(engine: Engine) -> None:
    """Wait until the idle engine has published all that it has computed."""
    end_s = time.monotonic() + 60
    while engine.call(lambda scheduler: len(scheduler.memory.publishing)).result():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def wait_until_known(engine: Engine, other: Engine) -> None:
    """Wait until the idle engine reports to routers all that the other one has published."""
    wait_until_published(other)
    expected = other.call(lambda scheduler: scheduler.events.held()).result()
    end_s = time.monotonic() + 60
    while not expected <= engine.call(lambda scheduler: scheduler.events.held()).result():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def test_an_engine_restores_what_another_has_computed(tmp_path):
    place, prompts = PoolPlace("pair", folder=tmp_path), prompts_of(3)
    with Engine(node_pool=place, **OPTIONS) as first:
        expected = tokens_of(first, prompts)
        wait_until_published(first)
        first.check()
        with Engine(node_pool=place, **OPTIONS) as second:
            wait_until_known(second, first)
            assert tokens_of(second, prompts) == expected
            found = hits(second)
            assert found["tokens_hit_on_host"] == found["tokens_hit"]
            assert found["tokens_hit"] >= found["tokens_queried"] - len(prompts) * BLOCK_SIZE
            second.check()
            # A damaged block is computed again, and so are those behind it.
            pool = second._node_pool
            pool.slots[:] ^= 1
            second.call(lambda scheduler: scheduler.memory.clear_cache()).result()
            with Engine(node_pool=place, **OPTIONS) as third:
                assert tokens_of(third, prompts) == expected
                assert hits(third)["tokens_hit"] == 0
                third.check()
            tokens_of(first, ["Another story of the quire"])
            wait_until_known(second, first)
        first.check()
    assert not list(tmp_path.iterdir()), "the last engine removes the pool"


def test_blocks_of_a_long_prompt_are_copied_together(tmp_path, monkeypatch):
    """One copy for each step that publishes, and one that restores all: blocks and slots ascend."""
    copied: dict[str, list[int]] = {"save": [], "restore": []}
    copy = CpuDevice.copy

    def counted(self, stream, target, source, name):
        if name in copied:
            copied[name].append(len(target))
        copy(self, stream, target, source, name)

    monkeypatch.setattr(CpuDevice, "copy", counted)
    place, (prompt,) = PoolPlace("runs", folder=tmp_path), prompts_of(1, 200)
    with Engine(node_pool=place, **OPTIONS) as first:
        tokens_of(first, [prompt])
        wait_until_published(first)
        with Engine(node_pool=place, **OPTIONS) as second:
            wait_until_known(second, first)
            tokens_of(second, [prompt])
            num_restored = hits(second)["tokens_hit_on_host"] // BLOCK_SIZE
    (num_blocks,) = copied["restore"]
    assert num_blocks == num_restored > 50
    # The last ones fill up while it decodes.
    assert sum(copied["save"]) >= num_blocks and max(copied["save"]) > 8


def test_an_engine_that_starts_after_a_sigkill_finds_all_but_the_last_blocks(tmp_path):
    # Contexts of 3,500 tokens, most of what the model can have.
    shape = (3, 240)
    child = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("pool_victim.py"), tmp_path, *map(str, shape)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        for line in child.stdout:
            streamed = json.loads(line)
            if min(map(len, streamed)) >= 100:
                break
    finally:
        child.kill()
        child.wait()
    assert list(tmp_path.iterdir()), "the pool outlives the engine"
    with Engine(**OPTIONS) as alone:
        ids = [
            list(alone.generate([p], GREEDY, progress=False)[0].prompt_token_ids)
            for p in prompts_of(*shape)
        ]
    # The streams go on where they ended, as a router lets them.
    continued = [[*prompt, *output[:500]] for prompt, output in zip(ids, streamed, strict=True)]
    with Engine(node_pool=PoolPlace("victim", folder=tmp_path), **OPTIONS) as engine:
        assert not engine._node_pool.is_new
        again = tokens_of(engine, continued)
        found = hits(engine)
        # Of each stream the last block may not have been full, and the one before it not published.
        assert found["tokens_hit"] >= found["tokens_queried"] - len(continued) * 3 * BLOCK_SIZE
        assert found["tokens_hit"] >= 0.95 * found["tokens_queried"]
        engine.check()
        assert engine.snapshot()["host_blocks"]["damaged"] == 0
    with Engine(**{**OPTIONS, "node_pool_gib": 0.0}) as cold:
        assert tokens_of(cold, continued) == again


def test_a_pool_that_does_not_fit_is_an_error_with_the_numbers(tmp_path):
    with pytest.raises(SizingError, match=r"node_pool_gib is 0.03: .* bytes .* set|object store"):
        Engine(node_pool=PoolPlace("full", set_aside=1 << 60, folder=tmp_path), **OPTIONS)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fails", ["run_largest", "mark_ready"])
def test_a_start_that_fails_leaves_no_file(tmp_path, monkeypatch, fails):
    def fail(runner):
        assert list(tmp_path.iterdir())
        raise OSError("no more")

    monkeypatch.setattr(Runner, fails, fail)
    with pytest.raises(OSError, match="no more"):
        Engine(node_pool=PoolPlace("failed", folder=tmp_path), **OPTIONS)
    assert not list(tmp_path.iterdir())


def test_the_old_name_is_refused_with_the_new_one():
    with pytest.raises(SizingError, match="cpu_offload_gib is now node_pool_gib"):
        EngineArgs(cpu_offload_gib=4.0)


def test_the_default_size_follows_from_the_memory():
    gpu = dict(checkpoint_bytes=16 * GIB, device_bytes=80 * GIB, set_aside=30 * GIB)
    assert default_pool_bytes(200 * GIB, shm_free=900 * GIB, **gpu) == (200 - 16 - 50) * GIB
    assert default_pool_bytes(2000 * GIB, shm_free=900 * GIB, **gpu) == 320 * GIB
    assert default_pool_bytes(200 * GIB, shm_free=100 * GIB, **gpu) == 35 * GIB
    assert default_pool_bytes(12 * GIB, shm_free=900 * GIB, **gpu) == 0
    cpu = dict(checkpoint_bytes=GIB, device_bytes=0, set_aside=0)
    assert default_pool_bytes(20 * GIB, shm_free=10 * GIB, **cpu) == GIB // 4
    assert default_pool_bytes(2 * GIB, shm_free=10 * GIB, **cpu) == GIB // 8


def test_a_pool_has_one_file_which_the_exit_of_its_last_process_removes(tmp_path):
    with Engine(node_pool=PoolPlace("one", folder=tmp_path), **OPTIONS) as engine:
        assert isinstance(engine._node_pool.file, PoolFile)
        assert len(list(tmp_path.iterdir())) == 1
        # An interpreter that exits, also after SIGTERM, calls this instead of `close`.
        engine._at_exit()
        assert not list(tmp_path.iterdir())
