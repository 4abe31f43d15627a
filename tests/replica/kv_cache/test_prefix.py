import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.protos.routing_hash import RoutingHasher
from quire.replica.kv_cache import prefix_entries
from quire.replica.kv_cache.blocks import IntegrityError
from quire.replica.kv_cache.cache_events import EventLog
from quire.replica.kv_cache.prefix import PrefixCache
from quire.replica.kv_cache.prefix_entries import ContentChain


def make_cache(block_size=8, num_blocks=64):
    return PrefixCache(block_size, num_blocks, EventLog(), model_name="m", revision="r")


def put(cache, token_ids, blocks, tenant=""):
    """Register the full blocks of a sequence as a scheduler would; returns what was indexed."""
    ids = np.asarray(token_ids, np.int32)
    chain, parent, indexed = ContentChain(tenant), None, []
    for i in range(len(ids) // cache.block_size):
        tokens = ids[i * cache.block_size : (i + 1) * cache.block_size]
        parent = cache.register([blocks[i]], parent, tokens.tobytes(), chain, i)
        indexed.append(parent and parent.blocks[0])
        if parent is None:
            break
    cache.hash_new()
    cache.check()
    return indexed


def find(cache, token_ids, tenant=""):
    (blocks,) = cache.match(np.asarray(token_ids, np.int32), tenant).blocks
    return blocks


def test_the_longest_known_prefix_is_found_and_one_token_is_left():
    cache = make_cache()
    tokens = list(range(24))
    assert put(cache, tokens, [5, 6, 7]) == [5, 6, 7]
    assert find(cache, tokens) == [5, 6]
    assert find(cache, [*tokens, 99]) == [5, 6, 7]
    assert find(cache, [*tokens[:12], 99, *tokens[13:]]) == [5]
    assert find(cache, [99, *tokens[1:]]) == []
    assert find(cache, tokens[:8]) == []
    assert find(cache, []) == []


def test_tenants_share_nothing():
    cache = make_cache()
    put(cache, range(16), [0, 1], tenant="a")
    assert find(cache, range(17), "a") == [0, 1]
    assert find(cache, range(17), "b") == []
    assert find(cache, range(17)) == []
    assert put(cache, range(16), [2, 3], tenant="b") == [2, 3]
    assert find(cache, range(17), "b") == [2, 3]


def test_known_content_keeps_its_first_block():
    cache = make_cache()
    put(cache, range(16), [0, 1])
    assert put(cache, range(24), [2, 3, 4]) == [0, 1, 4]
    assert find(cache, range(25)) == [0, 1, 4]
    assert 2 not in cache
    assert 4 in cache
    assert len(cache) == 3


def test_nothing_is_indexed_behind_a_block_that_is_not():
    cache = make_cache()
    chain = ContentChain()
    tokens = np.arange(16, dtype=np.int32)
    chain.extend(tokens[:8].tobytes())
    assert cache.register([1], None, tokens[8:].tobytes(), chain, 1) is None
    assert len(cache) == 0


def test_a_name_is_blake2b_of_parent_and_tokens_personalised_by_the_tenant():
    tokens = np.arange(8, dtype=np.int32).tobytes()
    chain = ContentChain("t")
    first, second = chain.extend(tokens), chain.extend(tokens)
    person = hashlib.blake2b(b"t", digest_size=16).digest()
    assert first == hashlib.blake2b(bytes(16) + tokens, digest_size=16, person=person).digest()
    assert second == hashlib.blake2b(first + tokens, digest_size=16, person=person).digest()
    assert first != ContentChain("u").extend(tokens)


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=0, max_size=6), st.sampled_from("ab")),
        min_size=1,
        max_size=12,
    )
)
@settings(deadline=None)
def test_a_hit_is_right_even_if_every_name_collides(sequences):
    """Names of 1 bit: a match still never returns a block of other tokens, another parent or tenant."""
    real = prefix_entries.block_digest
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_entries, "block_digest", lambda *args: bytes([real(*args)[0] % 2]))
        cache = make_cache(num_blocks=128)
        content = {}
        block = 0
        for letters, tenant in sequences:
            tokens = [letter for letter in letters for _ in range(8)]
            found = find(cache, [*tokens, 9], tenant)
            for i, hit in enumerate(found):
                assert content[hit] == (tenant, tokens[: 8 * (i + 1)])
            own = list(range(block, block + len(letters)))
            block += len(letters)
            for i, indexed in enumerate(put(cache, tokens, own, tenant)):
                if indexed == own[i]:
                    content[indexed] = (tenant, tokens[: 8 * (i + 1)])
                elif indexed is not None:
                    assert content[indexed] == (tenant, tokens[: 8 * (i + 1)])


def test_equal_tokens_behind_different_parents_are_different_content(monkeypatch):
    monkeypatch.setattr(prefix_entries, "block_digest", lambda parent, tokens, person: tokens[:1])
    cache = make_cache()
    put(cache, [1] * 8 + [7] * 8, [0, 1])
    assert put(cache, [2] * 8 + [7] * 8, [2, 3]) == [2, None]
    assert find(cache, [2] * 8 + [7] * 8 + [0]) == [2]
    assert find(cache, [1] * 8 + [7] * 8 + [0]) == [0, 1]


def test_a_chain_names_each_block_once():
    cache = make_cache()
    tokens = np.arange(40, dtype=np.int32)
    put(cache, tokens, list(range(5)))
    chain = ContentChain()
    cache.match(tokens, chain=chain)
    names = list(chain.digests)
    assert cache.match(tokens, chain=chain).blocks == [[0, 1, 2, 3]]
    assert chain.digests == names
    assert len(names) == 4


@pytest.mark.parametrize("block_size", [1, 8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("tenant", ["", "t"])
def test_the_hashes_told_are_those_that_the_router_computes(block_size, tenant):
    events = EventLog()
    cache = PrefixCache(block_size, 600, events, model_name="m", revision="r")
    tokens = np.random.default_rng(0).integers(0, 1000, 512 + block_size // 2).astype(np.int32)
    put(cache, tokens, list(range(len(tokens) // block_size)), tenant)
    whole = len(tokens) // block_size * block_size
    expected = RoutingHasher("m", "r", tenant).hashes(tokens[:whole])
    assert events.flush().stored.tolist() == expected.tolist()
    assert len(expected) == whole // 64


@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_a_hash_goes_when_the_first_block_of_it_goes(block_size):
    events = EventLog()
    cache = PrefixCache(block_size, 8, events, model_name="m", revision="r")
    num_blocks = 256 // block_size
    put(cache, range(256), list(range(num_blocks)))
    hashes = events.flush().stored.tolist()
    assert len(hashes) == 4
    gone = []
    for block in reversed(range(num_blocks)):
        cache.forget(block)
        batch = events.flush()
        gone += [] if batch is None else batch.removed.tolist()
        kept = block * block_size // 64
        assert set(gone) == set(hashes[kept:])
        assert len(gone) == len(set(gone))
    cache.check()


def test_a_block_that_others_continue_cannot_be_forgotten():
    cache = make_cache()
    put(cache, range(16), [0, 1])
    with pytest.raises(IntegrityError, match="before 1 that continue it"):
        cache.forget(0)
    cache.forget(1)
    cache.forget(0)
    with pytest.raises(IntegrityError, match="block 0 is not in the prefix index"):
        cache.forget(0)


def test_clearing_forgets_everything_and_says_so():
    events = EventLog()
    cache = PrefixCache(32, 8, events)
    put(cache, range(128), [0, 1, 2, 3])
    events.flush()
    assert cache.clear() == ([0, 1, 2, 3], [])
    batch = events.flush()
    assert (batch.cleared, len(batch.stored), len(batch.removed)) == (True, 0, 0)
    assert find(cache, range(129)) == []
    cache.check()


@pytest.mark.parametrize("block_size", [0, 3, 48, 96])
def test_a_block_must_divide_the_routing_block_or_be_a_multiple(block_size):
    with pytest.raises(ValueError, match=f"got {block_size}"):
        PrefixCache(block_size, 4, EventLog())


@pytest.mark.parametrize("block_size", [16, 64, 192])
def test_sequences_that_grow_together_are_hashed_as_if_alone(block_size):
    """One pass over blocks of several tenants and depths, parents and children of one step among them."""
    events = EventLog()
    rng = np.random.default_rng(1)
    sequences = [rng.integers(0, 1000, 1536).astype(np.int32) for _ in range(3)]
    chains = [ContentChain(tenant) for tenant in ("", "a", "b")]
    per_sequence = 1536 // block_size
    tables = [[n * per_sequence + i for i in range(per_sequence)] for n in range(3)]
    cache = PrefixCache(block_size, 3 * per_sequence, events, model_name="m", revision="r")
    done, tips = [0, 0, 0], [None, None, None]
    while min(done) < per_sequence:
        for n in range(3):
            for _ in range(int(rng.integers(0, 4))):
                i = done[n]
                if i == per_sequence:
                    break
                raw = sequences[n][i * block_size : (i + 1) * block_size].tobytes()
                tips[n] = cache.register([tables[n][i]], tips[n], raw, chains[n], i)
                assert tips[n].blocks == [tables[n][i]]
                done[n] += 1
        cache.hash_new()
        cache.check()
    told = set(events.flush().stored.tolist())
    expected = [
        RoutingHasher("m", "r", chain.tenant).hashes(tokens).tolist()
        for chain, tokens in zip(chains, sequences, strict=True)
    ]
    assert told == {routing_hash for hashes in expected for routing_hash in hashes}
    assert len(told) == 3 * 24


def test_a_block_that_goes_before_its_hash_was_told_leaves_nothing():
    events = EventLog()
    cache = PrefixCache(64, 4, events)
    cache.register([2], None, np.arange(64, dtype=np.int32).tobytes(), ContentChain(), 0)
    assert cache.num_unhashed == 1
    assert events.held() == set()
    cache.check()
    cache.forget(2)
    assert cache.num_unhashed == 0
    cache.check()
    assert events.held() == set()
    assert events.flush() is None
