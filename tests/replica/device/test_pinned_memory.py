"""Mappings that are registered with CUDA: at their exact size, once, until the last view of them is gone."""

from __future__ import annotations

import contextlib
import mmap
import os

import pytest
import torch
from fake_cuda import OUT_OF_MEMORY, FakeCudart, is_mapped
from pool_process import open_pool

from quire.replica.device.pinned_memory import HostMapping
from quire.replica.node_pool.pool_layout import PoolLayout

SIZE = (5 << 20) + 3


@pytest.fixture
def cudart() -> FakeCudart:
    return FakeCudart([])


def register(mapping: HostMapping, cudart: FakeCudart) -> str | None:
    calls = cudart.calls
    return mapping.register(
        cudart,
        synchronize=lambda: calls.append(("synchronize",)),
        forget_error=lambda: calls.append(("forget error",)),
    )


def test_exactly_the_bytes_asked_for_are_mapped_and_registered(cudart):
    mapping = HostMapping(SIZE)
    assert register(mapping, cudart) is None
    data = mapping.data
    assert (data.shape, data.dtype) == ((SIZE,), torch.uint8)
    assert data.untyped_storage().nbytes() == SIZE
    pages = -(-SIZE // mmap.PAGESIZE) * mmap.PAGESIZE
    assert cudart.registered == {data.data_ptr(): pages}
    assert data.data_ptr() % mmap.PAGESIZE == 0


def test_it_is_unregistered_once_when_the_last_view_is_gone_and_still_mapped_then(cudart):
    """`FakeCudart` asks the kernel whether the memory is there."""
    mapping = HostMapping(SIZE)
    register(mapping, cudart)
    address = mapping.data.data_ptr()
    view = mapping.data[mmap.PAGESIZE :].view(-1)[:8].view(torch.int64)
    mapping.data[mmap.PAGESIZE : mmap.PAGESIZE + 8] = torch.arange(8, dtype=torch.uint8)
    del mapping
    array = view.numpy()
    del view
    assert array.tobytes() == bytes(range(8)) and cudart.registered
    del array
    assert cudart.calls[1:] == [("synchronize",), ("unregister", cudart.calls[0][1])]
    assert not is_mapped(address, SIZE)


def test_the_nodes_pool_is_registered_where_it_is_mapped(cudart, tmp_path):
    with contextlib.closing(open_pool(tmp_path, PoolLayout(8, 4096))) as pool:
        mapping = HostMapping(len(pool.file.slots.memory), pool.file.slots.memory)
        assert register(mapping, cudart) is None
        ((address, size),) = cudart.registered.items()
        assert size == pool.layout.num_bytes
        slots = torch.from_numpy(pool.slots)
        assert address < slots.data_ptr() <= address + size - slots.nbytes
        mapping.data[-1] = 7
        assert os.pread(os.open(pool.path, os.O_RDONLY), 1, size - 1) == b"\x07"
        del mapping
        assert not cudart.registered


def test_a_device_that_has_failed_does_not_keep_memory_registered(cudart):
    def fail() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    mapping = HostMapping(SIZE)
    mapping.register(cudart, fail, forget_error=lambda: None)
    del mapping
    assert not cudart.registered


def test_memory_that_cuda_refuses_can_be_used_and_is_never_unregistered(cudart):
    cudart.result = OUT_OF_MEMORY
    mapping = HostMapping(SIZE)
    assert register(mapping, cudart) == "out of memory (CUDA error 2)"
    assert cudart.calls[1:] == [("forget error",)], "torch would raise it at its next kernel"
    mapping.data.fill_(7)
    del mapping
    assert len(cudart.calls) == 2


def test_what_cannot_be_unregistered_is_logged_by_its_size(cudart, caplog):
    mapping = HostMapping(4096)
    register(mapping, cudart)
    cudart.result = OUT_OF_MEMORY
    del mapping
    assert "could not unpin 4096 bytes of host memory: out of memory" in caplog.text
    assert cudart.calls[-1] == ("forget error",)


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTFORK"), reason="only Linux keeps it from a child")
def test_a_child_process_does_not_share_it():
    """Copy on write would give the parent another page than the one that the device writes to."""
    mapping = HostMapping(SIZE)
    address = mapping.data.data_ptr()
    child = os.fork()
    if child == 0:
        os._exit(3 if is_mapped(address, SIZE) else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert is_mapped(address, SIZE)
