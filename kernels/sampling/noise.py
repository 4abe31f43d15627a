"""Counter-based noise for sampling: a pure function of (seed, choice, position, token id).

The noise depends neither on state nor on the batch or the device. So every replica computes the same noise for the next
token of a stream, and a stream can continue on another replica.

On the host, once per row, in 64-bit arithmetic::

    key = mix64(mix64(mix64(seed + C) ^ choice) + position)         mix64: the finaliser of SplitMix64
    key_low, key_high = key & 0xFFFFFFFF, key >> 32

On the device, for each token id, in 32-bit arithmetic modulo 2^32::

    x = fmix32(token_id * 0x9E3779B1 + key_low) ^ key_high          fmix32: the finaliser of MurmurHash3
    u = ((fmix32(x) >> 9) + 0.5) * 2^-23                            24 significant bits: exact in float32
    gumbel = -log(-log(u))                                          u is never 0 or 1: always finite

fmix32 is a bijection, so all token ids of a row have different x. `u` has the same bits on every device with 32-bit
unsigned arithmetic (a Triton kernel uses `tl.uint32`); the two logarithms depend on the library.
argmax(logits + gumbel) is a sample from softmax(logits) (Gumbel 1954; Maddison et al. 2014).
"""

from __future__ import annotations

import numpy as np
import torch

_U64 = np.uint64
_MASK = 0xFFFFFFFF
_TOKEN_FACTOR = 0x9E3779B1  # 2^32 / golden ratio, odd: spreads token ids before the first mix
# int64 elements of one pass on the CPU; they fit the L2 cache, so all operations of the pass work there.
_CHUNK = 1 << 16


def _mix64(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014)."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
        return x ^ (x >> _U64(31))


def noise_keys(seed: np.ndarray, choice: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Compute the 64-bit noise key of each row.

    Parameters
    ----------
    seed
        [rows] uint64.
    choice, position
        [rows] int, non-negative.

    Returns
    -------
    [rows] uint64.
    """
    return keys_at(noise_bases(seed, choice), position)


def noise_bases(seed: np.ndarray, choice: np.ndarray) -> np.ndarray:
    """Compute the part of each row's key that depends on `seed` and `choice` but not on the position: [rows] uint64."""
    with np.errstate(over="ignore"):
        key = _mix64(np.asarray(seed, dtype=_U64) + _U64(0x9E3779B97F4A7C15))
        return _mix64(key ^ np.asarray(choice).astype(_U64))


def keys_at(bases: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Keys [rows] uint64 for `bases`, from `noise_bases`, at positions [rows] int."""
    with np.errstate(over="ignore"):
        return _mix64(bases + np.asarray(position).astype(_U64))


def uniform(keys: np.ndarray, vocab_size: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Compute uniform numbers in (0, 1).

    Parameters
    ----------
    keys
        [rows] uint64 from `noise_keys`.
    vocab_size
        Number of token ids: 0 .. vocab_size - 1.
    device
        Device of the result.

    Returns
    -------
    [rows, vocab_size] float32, multiples of 2^-24.
    """
    low = torch.from_numpy((keys & _U64(_MASK)).astype(np.int64)).to(device)[:, None]
    high = torch.from_numpy((keys >> _U64(32)).astype(np.int64)).to(device)[:, None]
    counter = torch.arange(vocab_size, dtype=torch.int64, device=device) * _TOKEN_FACTOR
    out = torch.empty(len(keys), vocab_size, dtype=torch.float32, device=device)
    rows = max(_CHUNK // vocab_size, 1) if out.device.type == "cpu" else max(len(keys), 1)
    for start in range(0, len(keys), rows):
        part = slice(start, start + rows)
        x = (counter + low[part]).bitwise_and_(_MASK)
        x = _fmix32_(x).bitwise_xor_(high[part])
        out[part] = _fmix32_(x).bitwise_right_shift_(9)
    return out.add_(0.5).mul_(2.0**-23)


def gumbel(keys: np.ndarray, vocab_size: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Compute standard Gumbel noise, [rows, vocab_size] float32, from the noise keys of the rows."""
    return uniform(keys, vocab_size, device).log_().neg_().log_().neg_()


def _fmix32_(x: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's 32-bit finaliser, in place, on unsigned 32-bit values stored as int64.

    The products wrap modulo 2^64, so their low 32 bits are correct.
    """
    x.bitwise_xor_(x >> 16)
    x.mul_(0x85EBCA6B).bitwise_and_(_MASK)
    x.bitwise_xor_(x >> 13)
    x.mul_(0xC2B2AE35).bitwise_and_(_MASK)
    return x.bitwise_xor_(x >> 16)
