"""The host tier's memory: copies in the order of the offload stream, timed, and an error that says what is short."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from fake_device import HOST, FakeDevice
from hypothesis import given
from hypothesis import strategies as st
from pool_process import open_pool

from quire.replica.config import SizingError
from quire.replica.device import host_pool
from quire.replica.device.cpu_device import CpuDevice
from quire.replica.device.device import Device, Stream
from quire.replica.device.host_pool import HostPool
from quire.replica.device.kv_pool import KVPool
from quire.replica.kv_cache.groups import LayerGroup
from quire.replica.node_pool.pool_layout import PoolLayout

GROUP = LayerGroup(layers=(0,), num_kv_heads=1, head_dim=2)
NONE = np.empty((0, 2), np.int64)


def pools(device: Device) -> tuple[KVPool, HostPool]:
    """Four blocks each; block i of the device is full of i."""
    pool = KVPool(4, (GROUP,), 8, torch.float32)
    pool.data[:] = torch.arange(5.0)[:, None]
    host = HostPool(4, pool, device)
    host.poison()
    return pool, host


def told_of(device: FakeDevice, pool: KVPool) -> list[float]:
    """What a step on the compute stream sees of each block."""
    seen: list[float] = []
    device.run(Stream.COMPUTE, lambda: seen.extend(pool.data[:, 0].tolist()), name="read")
    device.record(Stream.COMPUTE, "read").wait()
    return seen


def lazy_offload() -> FakeDevice:
    """A device whose offload stream runs only when somebody waits for it."""
    device = FakeDevice(0)
    device._pace.eagerness = 0.0
    device._pace.weights = {stream: 1.0 for stream in Stream} | {Stream.OFFLOAD: 1e-9}
    return device


@pytest.mark.parametrize("seed", range(10))
def test_what_is_restored_is_there_for_the_step_that_uses_it(seed):
    device = FakeDevice(seed)
    pool, host = pools(device)
    host.move(np.array([[1, 3], [2, 0]]), NONE)
    device.run(Stream.COMPUTE, lambda: pool.data[1:3].fill_(-1.0), name="others write them")
    host.move(NONE, np.array([[3, 0], [0, 3]]), step=2, used_now=False)
    host.move_rest()
    host.move(NONE, NONE, step=3, used_now=True)
    assert told_of(device, pool) == [1.0, -1.0, -1.0, 2.0, 4.0]
    assert (Stream.COMPUTE.value, "blocks restored") in device.waits
    assert HOST not in {who for who, name in device.waits if name != "read"}


def test_steps_that_do_not_use_what_is_restored_run_beside_it():
    device = lazy_offload()
    pool, host = pools(device)
    host.move(np.array([[1, 3]]), NONE, step=1)
    host.move(NONE, np.array([[3, 0]]), step=2, written=np.array([2]), used_now=False)
    host.move_rest()
    assert told_of(device, pool) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert host.take_measured() == () and host.restored_step == 1
    host.move(NONE, NONE, step=3, written=np.array([2]), used_now=False)
    assert told_of(device, pool)[0] == 0.0, "nor does the step behind it wait"
    device.synchronize()
    host.take_measured()
    assert host.restored_step == 3 and pool.data[0, 0] == 1.0


def test_a_step_waits_for_the_saves_of_what_it_writes_and_for_no_others(monkeypatch):
    monkeypatch.setattr(host_pool, "_PIECE_BYTES", 1)  # a block is a piece
    device = lazy_offload()
    pool, host = pools(device)
    host.move(np.array([[0, 0], [1, 1], [2, 2], [3, 3]]), NONE, step=1, written=np.array([1]))
    device.run(Stream.COMPUTE, lambda: pool.data[1].fill_(-1.0), name="write")
    host.move_rest()
    device.record(Stream.COMPUTE, "written").wait()
    saved = host.data[:, 0].isnan().logical_not().tolist()
    assert saved == [False, True, False, False]
    host.move(NONE, NONE, step=2, written=np.array([9]), used_now=False)
    assert told_of(device, pool)[1] == -1.0
    assert host.data[:, 0].isnan().sum() == 3, "a step that writes none of them waits for none"
    host.move(NONE, NONE, step=3, written=np.array([2]), used_now=False)
    device.run(Stream.COMPUTE, lambda: pool.data[2].fill_(-1.0), name="write")
    device.record(Stream.COMPUTE, "written").wait()
    saved = host.data[:, 0].isnan().logical_not().tolist()
    assert saved == [False, True, True, True], "from the end of the sequence on"
    device.synchronize()
    assert host.data[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
    host.move(NONE, NONE, step=4, written=np.array([0]), used_now=False)
    assert not host.is_saving


def test_what_a_failed_launch_left_is_not_copied():
    device = FakeDevice(0)
    _, host = pools(device)
    host.move(np.array([[0, 0]]), NONE, step=1, written=np.array([1]))
    host.move(NONE, NONE, step=2, written=np.array([1]))
    host.move_rest()
    device.synchronize()
    assert host.data[0].isnan().all() and host.num_saved == 0


def test_a_copy_is_measured_once_it_is_over():
    device = FakeDevice(0)
    device._pace.eagerness = 0.0
    _, host = pools(device)
    host.move(np.array([[1, 3]]), NONE)
    host.move(NONE, np.array([[3, 0], [3, 2]]))
    assert host.take_measured() == ()
    device.synchronize()
    ((count, seconds),) = host.take_measured()
    assert count == 2 and seconds >= 2  # this device takes a second for a piece of work
    assert host.take_measured() == ()
    told = host.telemetry()
    assert (told["num_saved"], told["num_restored"], told["restore_s"]) == (1, 2, seconds)


def test_on_the_cpu_it_is_over_at_once():
    pool, host = pools(CpuDevice())
    host.move(np.array([[1, 3]]), np.array([[3, 0]]))
    assert pool.data[:, 0].tolist() == [1.0, 1.0, 2.0, 3.0, 4.0]
    ((count, seconds),) = host.take_measured()
    assert count == 1 and seconds > 0


@given(
    blocks=st.permutations(range(12)),
    host_blocks=st.permutations(range(12)),
    count=st.integers(1, 12),
    is_sorted=st.booleans(),
    is_whole=st.booleans(),
)
def test_runs_of_blocks_are_copied_at_once_and_each_block_where_it_belongs(
    blocks, host_blocks, count, is_sorted, is_whole
):
    pairs = np.array([blocks[:count], host_blocks[:count]]).T
    if is_sorted:  # so that there are long runs
        pairs = np.sort(pairs, axis=0)
    device = CpuDevice()
    pool = KVPool(12, (GROUP,), 8, torch.float32)
    pool.data[:] = torch.arange(13.0)[:, None]
    host = HostPool(12, pool, device)
    host.poison()
    host._is_whole = is_whole
    copies: list[int] = []

    def copy(stream: Stream, target: torch.Tensor, source: torch.Tensor, name: str) -> None:
        copies.append(len(target))
        target.copy_(source)

    device.copy = copy
    host.move(pairs, NONE)
    host.move_rest()
    expected = torch.full((12,), float("nan"))
    expected[torch.from_numpy(pairs[:, 1])] = torch.from_numpy(pairs[:, 0]).float()
    assert torch.equal(host.data[:, 0].nan_to_num(-1), expected.nan_to_num(-1))
    # In any order.
    num_runs = 1 + sum((np.diff(pairs[pairs[:, 0].argsort()], axis=0) != 1).any(1).tolist())
    assert copies == [1] * count if not is_whole else len(copies) == num_runs
    pool.data.zero_()
    host.move(NONE, pairs[:, ::-1])
    host.move_rest()
    back = torch.zeros(13)
    back[torch.from_numpy(pairs[:, 0])] = torch.from_numpy(pairs[:, 0]).float()
    assert torch.equal(pool.data[:, 0], back)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), OSError(12, "Cannot allocate")])
def test_a_tier_that_the_host_has_no_memory_for_is_an_error_with_its_size(error):
    class Full(CpuDevice):
        def pinned(self, shape, dtype):
            raise error

    pool = KVPool(4, (GROUP,), 8, torch.float32, "meta")
    size = 3 * pool.data[0].nbytes
    with pytest.raises(
        SizingError, match=rf"node_pool_gib: the host has no {size} bytes .*{error.args[-1]}"
    ):
        HostPool(3, pool, Full())


def test_blocks_in_the_nodes_pool_are_saved_when_their_copies_have_ended(tmp_path):
    device = lazy_offload()
    pool = KVPool(4, (GROUP,), 8, torch.float32)
    pool.data[:] = torch.arange(5.0)[:, None]
    layout = PoolLayout(6, pool.data[0].nbytes)
    with contextlib.closing(open_pool(tmp_path, layout)) as node_pool:
        host = HostPool(6, pool, device, node_pool.file.slots)
        host.move(np.array([[1, 3], [2, 5]]), NONE, written=np.array([0]))
        host.move_rest()
        assert host.take_saved() == (), "nobody may find them yet"
        device.synchronize()
        assert sorted(host.take_saved()) == [3, 5]
        assert host.take_saved() == ()
        saved = node_pool.slots[5].view(np.float32)
        assert (saved == 2.0).all(), "in the shared memory itself"
        # The save of a failed step does not make its slot's next content complete.
        host.move(np.array([[1, 3]]), NONE, written=np.array([0]))
        host.move_rest()
        device.synchronize()
        host.move(np.array([[2, 3]]), NONE, written=np.array([0]))
        assert host.take_saved() == ()
        host.move_rest()
        device.synchronize()
        assert host.take_saved() == (3,)
