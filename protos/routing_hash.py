"""64-bit hashes of prompt prefixes, by which replicas name the blocks in their caches to routers. Plain numpy."""

from __future__ import annotations

import functools
import hashlib

import numpy as np

ROUTING_BLOCK_TOKENS = 64
_U64 = np.uint64
MIN_ROUTING_WEIGHTS = 1 << 15
# Zero-dimensional arrays, because numpy would have to convert a Python number in each operation.
_MIX_ADD = np.array(0x9E3779B97F4A7C15, _U64)
_MIX_ROUNDS = (
    (np.array(30, _U64), np.array(0xBF58476D1CE4E5B9, _U64)),
    (np.array(27, _U64), np.array(0x94D049BB133111EB, _U64)),
)
_MIX_LAST = np.array(31, _U64)
# Differs from each chain seed by chance; any number but 0 would do.
_MARK = np.array(0xD1B54A32D192ED03, _U64)


def _splitmix64(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014): a bijection that mixes all 64 bits.

    Takes arrays only: with scalars numpy warns when a product wraps around.
    """
    x = x + _MIX_ADD
    for shift, factor in _MIX_ROUNDS:
        x ^= x >> shift
        x *= factor
    x ^= x >> _MIX_LAST
    return x


@functools.lru_cache(maxsize=8)
def _weight_table(num_bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first 2^num_bits weights, [2^num_bits / 64, 64] uint64, and their sums per block, [2^num_bits / 64].

    All hashers of a process share the table.
    """
    weights = _splitmix64(np.arange(1 << num_bits, dtype=_U64)) | _U64(1)
    weights = weights.reshape(-1, ROUTING_BLOCK_TOKENS)
    sums = weights.sum(axis=1, dtype=_U64)
    weights.setflags(write=False)
    sums.setflags(write=False)
    return weights, sums


def routing_weights(num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Return weights for at least `num_tokens` positions, [blocks, 64] uint64, and their sums per block, [blocks]."""
    return _weight_table((max(num_tokens, MIN_ROUTING_WEIGHTS) - 1).bit_length())


def routing_block_sums(starts: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
    """Compute the term that each of n routing blocks adds to the running sum of its sequence, in one pass.

    Parameters
    ----------
    starts
        [n] integers, absolute position of each block's first token; multiples of 64.
    token_ids
        [n, 64] any integer dtype, non-negative.

    Returns
    -------
    [n] uint64.
    """
    if not len(starts):
        return np.empty(0, _U64)
    weights, sums = routing_weights(int(starts.max()) + ROUTING_BLOCK_TOKENS)
    rows = starts // ROUTING_BLOCK_TOKENS
    return _block_sums(token_ids, weights.take(rows, axis=0), sums.take(rows))


def _block_sums(token_ids: np.ndarray, weights: np.ndarray, weight_sums: np.ndarray) -> np.ndarray:
    """Return [n] uint64, the sum of w (t + 1) over each block, computed as sum of w t + sum of w.

    `einsum` reads each operand once and stores no products: 5 us for 256 blocks; multiply and sum take 8 us.
    """
    sums: np.ndarray = np.einsum("ij,ij->i", token_ids.astype(_U64), weights)
    sums += weight_sums
    return sums


def routing_hashes(running_sums: np.ndarray, chain_seeds: np.ndarray | np.uint64) -> np.ndarray:
    """Return the hashes of prefixes, [n] uint64, from their running sums, [n] uint64, and the seeds of their chains."""
    return _splitmix64(running_sums ^ chain_seeds)


def state_marks(hashes: np.ndarray) -> np.ndarray:
    """Return the marks of prefixes, [n] uint64, from their hashes, [n] uint64.

    A replica of a recurrent model holds the mark of a prefix, beside its hash, if it has a snapshot of the states
    there. A hit can end only at such a prefix.
    """
    return _splitmix64(hashes ^ _MARK)


class RoutingHasher:
    """Computes a 64-bit hash of every 64-token prefix of a prompt. It is a hint for routing, never a proof of equality.

    ``h[i] = splitmix64(chain_seed ^ sum(w[t] * (token[t] + 1) for t < 64 * (i + 1)))`` modulo 2^64 with fixed
    pseudo-random odd weights w: multilinear hashing. A prefix sum computes all hashes of a prompt in one
    vectorised pass, and a running sum extends them as tokens are generated. h[i] depends on every token
    before it, so equal hashes mean equal prefixes, with an error probability of 2^-64 for prompts not made to collide.
    A collision makes a router choose a worse replica. It cannot cause a wrong answer, because the engine looks up KV by
    its own keyed BLAKE2b hashes.

    The engine extends many sequences at once by one block each; it calls `routing_block_sums` and `routing_hashes`
    instead of this class.

    Parameters
    ----------
    model, revision, tenant
        Different values give different hashes for the same tokens, so tenants do not share prefixes.
    """

    def __init__(self, model: str, revision: str = "", tenant: str = ""):
        key = "\x00".join((model, revision, tenant)).encode()
        digest = hashlib.blake2b(key, digest_size=8, person=b"quire-route").digest()
        self.chain_seed = _U64(int.from_bytes(digest, "little"))

    def hashes(self, token_ids: np.ndarray) -> np.ndarray:
        """Hash the prefix that ends with each complete routing block.

        Parameters
        ----------
        token_ids
            [tokens] any integer dtype, non-negative.

        Returns
        -------
        [tokens // 64] uint64; hash i covers tokens [0, 64 * (i + 1)).
        """
        return self.extend(_U64(0), 0, token_ids)[0]

    def extend(
        self, running_sum: np.uint64, start: int, token_ids: np.ndarray
    ) -> tuple[np.ndarray, np.uint64]:
        """Compute the hashes of the routing blocks in `token_ids`, and the new running sum.

        Parameters
        ----------
        running_sum
            Sum over the tokens before `start` (0 when start is 0).
        start
            Absolute position of token_ids[0]; a multiple of 64.
        token_ids
            [tokens] any integer dtype; an incomplete block at the end is ignored.
        """
        if start % ROUTING_BLOCK_TOKENS:
            raise ValueError(f"start must be a multiple of {ROUTING_BLOCK_TOKENS}, got {start}")
        blocks = len(token_ids) // ROUTING_BLOCK_TOKENS
        if blocks == 0:
            return np.empty(0, _U64), running_sum
        tokens = blocks * ROUTING_BLOCK_TOKENS
        ids = np.asarray(token_ids[:tokens]).reshape(blocks, ROUTING_BLOCK_TOKENS)
        weights, weight_sums = routing_weights(start + tokens)
        first = start // ROUTING_BLOCK_TOKENS
        sums = _block_sums(
            ids, weights[first : first + blocks], weight_sums[first : first + blocks]
        )
        sums[:1] += running_sum
        np.add.accumulate(sums, out=sums)
        return routing_hashes(sums, self.chain_seed), sums[-1]


def xor_hashes(hashes: np.ndarray) -> int:
    """Return the XOR of [n] uint64; 0 for an empty array."""
    return int(np.bitwise_xor.reduce(hashes)) if len(hashes) else 0


def tier_digest(gpu_xor: int, host_xor: int) -> int:
    """Return the digest of a cache from the XOR of the hashes in each tier: `gpu_xor ^ (host_xor rotated left by 1)`.

    The rotation makes the tiers differ: a hash that changes its tier changes the digest.
    """
    return gpu_xor ^ ((host_xor << 1 | host_xor >> 63) & (2**64 - 1))
