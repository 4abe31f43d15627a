"""Huge pages: Linux gets the advice, and nothing else changes."""

import mmap
import re
from pathlib import Path

import pytest
import torch

from quire.kernels.huge_pages import ask_for_huge_pages, back_with_memory

needs_linux = pytest.mark.skipif(
    not hasattr(mmap, "MADV_HUGEPAGE"), reason="large pages are asked for on Linux only"
)


def mapped(size: int) -> torch.Tensor:
    """Fresh memory, because parts of the heap may have been advised already."""
    return torch.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE), dtype=torch.uint8)


def advised_bytes(address: int, size: int) -> int:
    """Bytes of [address, address + size) in mappings that may have huge pages."""
    found, overlap = 0, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            begin, end = (int(bound, 16) for bound in match.groups())
            overlap = max(0, min(end, address + size) - max(begin, address))
        elif line.startswith("VmFlags:") and " hg" in line:
            found += overlap
    return found


@needs_linux
def test_whole_pages_of_a_large_tensor_are_advised():
    x = mapped(8 << 20)
    ask_for_huge_pages(x)
    assert advised_bytes(x.data_ptr(), x.nbytes) >= x.nbytes - 2 * mmap.PAGESIZE


@needs_linux
def test_what_lies_beside_a_tensor_is_not_advised():
    whole = mapped(8 << 20)
    x = whole[(4 << 20) + 5 : 6 << 20]
    ask_for_huge_pages(x)
    assert advised_bytes(whole.data_ptr(), whole.nbytes) == x.nbytes + 5 - mmap.PAGESIZE


@pytest.mark.parametrize("size", [0, 1, mmap.PAGESIZE - 1, 3 * mmap.PAGESIZE + 5])
def test_contents_stay(size):
    x = torch.arange(size, dtype=torch.uint8)
    expected = x.clone()
    ask_for_huge_pages(x)
    assert torch.equal(x, expected)


@needs_linux
def test_backed_memory_is_resident_and_keeps_its_contents():
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    x = mapped(64 << 20)
    x[5000] = 7
    before = resident_bytes()
    assert back_with_memory(x[100 : 48 << 20])
    assert (40 << 20) < resident_bytes() - before < (56 << 20)
    assert x[5000] == 7 and int(x.sum()) == 7
