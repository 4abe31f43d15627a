"""`CudaDevice` on a torch.cuda that only keeps a record: pinning, rehearsals, captures that fail.

`test_device.py` has what needs a GPU.
"""

from __future__ import annotations

import ast
import gc
from pathlib import Path

import pytest
import torch
from fake_cuda import OUT_OF_MEMORY, FakeCuda

from quire.replica.device import cuda_device
from quire.replica.device.cuda_device import CudaDevice

ROOT = Path(cuda_device.__file__).parents[1]
LARGE = ((5 << 20) + 4, torch.float16)


@pytest.fixture
def cuda(monkeypatch) -> FakeCuda:
    fake = FakeCuda()
    fake.install(monkeypatch)
    return fake


@pytest.fixture
def device(cuda) -> CudaDevice:
    return CudaDevice(torch.device("cpu"))  # where its tensors lie


# -- pinned memory -------------------------------------------------------------------------------------------


def test_no_private_part_of_torch_is_needed(cuda, monkeypatch):
    """torch 2.11 answers settings that it does not know with a ValueError."""

    def refuse(*args: object) -> None:
        raise ValueError(f"Unrecognized key in {args}")

    private = [
        name for name in dir(torch._C) if "llocator" in name and callable(getattr(torch._C, name))
    ]
    assert "_accelerator_setAllocatorSettings" in private
    for name in private:
        monkeypatch.setattr(torch._C, name, refuse)
    device = CudaDevice(torch.device("cpu"))
    device.pinned(LARGE[:1], LARGE[1])
    device.trim()


def test_no_module_of_the_engine_names_torchs_private_part():
    for path in sorted(ROOT.glob("*.py")):
        attributes = (
            n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)
        )
        assert "torch._C" not in map(ast.unparse, attributes), path.name


def test_large_pinned_memory_is_registered_at_its_own_size(cuda, device):
    host = device.pinned((2, *LARGE[:1]), LARGE[1])
    num_bytes = 2 * LARGE[0] * 2
    assert (host.shape, host.dtype, host.nbytes) == ((2, LARGE[0]), torch.float16, num_bytes)
    ((_, registered),) = cuda.calls
    assert 0 <= registered - num_bytes < 4096
    row = host[1]
    del host
    assert cuda.cudart.registered, "a view keeps it"
    del row
    assert not cuda.cudart.registered


@pytest.mark.parametrize("size, is_large", [((1 << 20) - 1, False), (1 << 20, True)])
def test_small_rings_come_from_torchs_own_allocator(cuda, device, monkeypatch, size, is_large):
    asked: list[dict] = []
    real = torch.empty

    def empty(*args: object, pin_memory: bool = False, **kwargs: object) -> torch.Tensor:
        asked.append(dict(pin_memory=pin_memory))
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", empty)
    assert device.pinned((size,), torch.uint8).nbytes == size
    assert asked == ([] if is_large else [dict(pin_memory=True)])
    assert ("register" in cuda.names) == is_large


def test_memory_that_cannot_be_pinned_is_used_unpinned_and_the_log_says_so_once(
    cuda, device, monkeypatch, caplog
):
    monkeypatch.setattr(cuda_device, "lock_limit_bytes", lambda: 65536)
    cuda.cudart.result = OUT_OF_MEMORY
    for _ in range(2):
        device.pinned((3 << 20,), torch.uint8).fill_(1)
    (record,) = caplog.records
    assert str(3 << 20) in record.message
    assert "out of memory (CUDA error 2); the process may lock 65536 bytes" in record.message


def test_a_device_that_has_failed_is_not_taken_for_one_that_refuses(cuda, device, monkeypatch):
    def fail(device: object = None) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    cuda.cudart.result = OUT_OF_MEMORY
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        device.pinned(LARGE[:1], LARGE[1])


# -- rehearsals and captures ---------------------------------------------------------------------------------


@pytest.mark.parametrize("previous", [0, 1])
def test_a_rehearsal_refuses_what_makes_the_host_wait_and_restores_the_mode(cuda, device, previous):
    cuda.sync_debug_mode = previous
    seen = []
    device.rehearse(lambda: seen.append(cuda.sync_debug_mode), name="fine")
    assert (seen, cuda.sync_debug_mode, cuda.names) == (["error"], previous, ["synchronize"])
    with pytest.raises(RuntimeError, match="synchronizing"):
        device.rehearse(cuda.item, name="reads back")
    assert (cuda.sync_debug_mode, cuda.names) == (previous, ["synchronize"] * 2)
    assert device.no_graphs_because is None


def test_a_capture_leaves_the_allocators_cache_alone_and_collects_no_garbage(cuda, device):
    is_collecting = []
    device.capture(lambda: is_collecting.append(gc.isenabled()), name="step")
    assert cuda.calls == [("synchronize",), ("begin", 0, "thread_local"), ("end",)]
    assert is_collecting == [False] and gc.isenabled()


def test_a_capture_that_python_fails_is_ended_and_others_follow(cuda, device):
    """As one that lacks memory: CUDA has nothing against it."""

    def lack() -> None:
        raise torch.OutOfMemoryError("20 MiB")

    with pytest.raises(torch.OutOfMemoryError):
        device.capture(lack, name="step")
    assert device.no_graphs_because is None and gc.isenabled()
    device.trim()
    device.capture(lambda: None, name="step")
    begun = [pool for name, pool, _ in (call for call in cuda.calls if call[0] == "begin")]
    assert begun == [0, 1], "torch refuses a pool that its last graph has left"


def test_after_a_capture_that_cuda_refuses_to_end_there_is_no_other_and_the_cache_stays(
    cuda, device, caplog
):
    graph = device.capture(lambda: None, name="one that works")
    with pytest.raises(RuntimeError, match="invalidated") as failure:
        device.capture(cuda.item, name="a step of 6 rows")
    assert "not permitted when stream is capturing" in str(failure.value.__context__)
    assert "a step of 6 rows failed" in device.no_graphs_because
    (record,) = caplog.records
    assert "this process captures no more graphs" in record.message and "6 rows" in record.message
    begun = cuda.names.count("begin")
    with pytest.raises(RuntimeError, match="a step of 8 rows cannot be captured: a step of 6 rows"):
        device.capture(lambda: None, name="a step of 8 rows")
    assert cuda.names.count("begin") == begun
    device.trim()  # `empty_cache` would fail torch's assertion
    assert not {"empty_cache", "empty_host_cache"} & set(cuda.names)
    assert caplog.records == [record]
    device.replay(graph)
    device.release(graph)
    assert cuda.names[-2:] == ["replay", "reset"]


def test_a_graph_that_was_not_ended_is_kept_because_torchs_allocator_has_a_pointer_to_it(
    cuda, device
):
    with pytest.raises(RuntimeError):
        device.capture(cuda.item, name="a step")
    gc.collect()
    assert [x for x in gc.get_objects() if type(x) is torch.cuda.CUDAGraph]
    assert "reset" not in cuda.names


def test_another_device_of_the_process_finds_out_before_it_captures(cuda, device, caplog):
    with pytest.raises(RuntimeError):
        device.capture(cuda.item, name="a step")
    second = CudaDevice(torch.device("cpu"))
    second.trim()
    assert "another capture" in second.no_graphs_because


def test_trim_gives_back_what_is_kept_of_the_device_and_of_the_host(cuda, device, monkeypatch):
    """As the staging buffers that the weights were read through."""
    device.trim()
    assert cuda.names == ["synchronize", "empty_host_cache", "empty_cache"]
    monkeypatch.delattr(torch.accelerator, "empty_host_cache")  # torch 2.11 has none
    device.trim()
    assert cuda.names[3:] == ["synchronize", "empty_cache"]


def test_an_error_of_trim_that_is_not_about_captures_is_raised(cuda, device, monkeypatch):
    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "empty_cache", fail)
    with pytest.raises(RuntimeError, match="illegal"):
        device.trim()
    assert device.no_graphs_because is None
