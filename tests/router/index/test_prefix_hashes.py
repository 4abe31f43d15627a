"""The compiled hashes compared with numpy's, and the library's version."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as of_numpy

from quire.kernels.library_loader import NativeLibraryError
from quire.protos.routing_hash import RoutingHasher
from quire.router import compiled_router
from quire.router.index.prefix_hashes import _weights, prefix_hashes

needs_library = pytest.mark.skipif(
    compiled_router.load() is None, reason="installed without a C compiler"
)


@needs_library
@given(
    of_numpy.arrays(np.int32, st.integers(0, 1000), elements=st.integers(0, 2**31 - 1)),
    st.text(max_size=5),
)
def test_any_prompt_has_the_hashes_of_the_wire(token_ids, tenant):
    hasher = RoutingHasher("m", tenant=tenant)
    hashes = prefix_hashes(hasher, token_ids)
    assert (hashes.dtype, hashes.tolist()) == (np.uint64, hasher.hashes(token_ids).tolist())


@pytest.mark.usefixtures("either_library")
def test_a_prompt_beyond_the_first_table_of_weights():
    hasher = RoutingHasher("m")
    token_ids = np.random.default_rng(0).integers(0, 200_000, 70_001, dtype=np.int32)
    assert (prefix_hashes(hasher, token_ids) == hasher.hashes(token_ids)).all()


@needs_library
def test_most_lengths_share_their_weights():
    _weights.cache_clear()
    for num_tokens in (0, 64, 1000, 5000, 32_768, 64):
        prefix_hashes(RoutingHasher("m"), np.zeros(num_tokens, np.int32))
    assert _weights.cache_info().misses == 1


@pytest.mark.parametrize("token_ids", [np.arange(640), np.arange(1280, dtype=np.int32)[::2]])
def test_what_the_library_does_not_read_is_hashed_all_the_same(token_ids):
    hasher = RoutingHasher("m")
    assert prefix_hashes(hasher, token_ids).tolist() == hasher.hashes(token_ids).tolist()


@needs_library
def test_a_library_of_other_sources_is_refused(monkeypatch):
    compiled = compiled_router._ABI
    monkeypatch.setattr(compiled_router, "_ABI", 0)
    with pytest.raises(NativeLibraryError, match=rf"has version {compiled}, this package needs 0"):
        compiled_router.load.__wrapped__()
