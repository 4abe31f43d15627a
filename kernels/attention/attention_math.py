"""Tile arithmetic that the decode and prefill kernels share.

Online softmax over tiles of keys in base 2, f = scale * log2(e)::

    s_j = f * q.k_j          m' = max(m, max_j s_j)         a = 2^(m - m')
    p_j = 2^(s_j - m')       l' = a * l + sum_j p_j         o' = a * o + sum_j p_j v_j

Soft-cap replaces f * q.k by log2(e) * c * tanh(scale * q.k / c). A sink is one more logit with a value vector of
zeros: it is added to l once, at the end of the row; the output is o = o' / l'.

A multiply-add for which the compiler could choose the rounding is written as an explicit `fma`, and the compiler may
not fuse any others. A key that a query does not see adds an exact zero. So a row's bits depend neither on the other
rows of its tile nor on how far the loop runs beyond the row's own keys.

Keys and values lie in blocks, [num_blocks, kv_heads, block_size, elements of a key or a value]; the tokens of one
block and head are contiguous. With TILE <= BLOCK_SIZE a tile is one contiguous run: one scalar load of a block id, then
affine addresses.

A tile's width is a power of two. A key may be two tiles, because padding 576 elements to 1024 would not fit shared
memory; q.k is then the sum of two products. In latent attention the first tile is also the value, loaded once::

    key 192, value 128      K [0, 128) | K [128, 192)      V [0, 128)
    latent 512 + 64         K [0, 512) | K [512, 576)      V is the first tile of K
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.tuning import has_fp8_conversion

LOG2E = tl.constexpr(1.4426950408889634)

# How a KV element becomes an operand of `tl.dot` (the kernels' argument FP8).
FP8_NONE = tl.constexpr(0)  # the cache has the dtype of q: no conversion
FP8_NATIVE = tl.constexpr(1)  # float8_e4m3fn, converted by the hardware
FP8_BITS = tl.constexpr(
    2
)  # float8_e4m3fn passed as uint8 and decoded by bit operations, for other devices


@triton.jit
def first_key(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Position of the first key that a query at `position` sees. WINDOW and CHUNK are 0 where there is no limit."""
    if WINDOW > 0:
        first = tl.maximum(position - (WINDOW - 1), 0)
    elif CHUNK > 0:
        first = position // CHUNK * CHUNK
    else:
        first = position * 0
    return first


@triton.jit
def split_range(kv_len, SPLIT: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """First split and number of splits with keys that the last of `kv_len` tokens sees; an empty row has 0 splits."""
    begin = first_key(tl.maximum(kv_len - 1, 0), WINDOW, CHUNK) // SPLIT
    return begin, (kv_len + SPLIT - 1) // SPLIT - begin


@triton.jit
def position_seen(position, begin, end, LOCAL: tl.constexpr):
    """Whether a position lies in [begin, end). Without LOCAL, `begin` is 0 and the comparison with it is left out."""
    seen = position < end
    if LOCAL:
        seen = seen & (position >= begin)
    return seen


@triton.jit
def tile_offsets(
    table_ptr, start, begin, end, stride_block,
    WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    MASKED: tl.constexpr, LOCAL: tl.constexpr,
):  # fmt: skip
    """Return the addresses of tokens [start, start + TILE): an int64 base and [TILE] offsets.

    They count elements from the head's first element in block 0. A token has WIDTH elements.

    A MASKED tile may extend beyond [begin, end); table entries of tokens outside are not read.
    """
    token = tl.arange(0, TILE)
    if TILE <= BLOCK_SIZE:
        block = tl.load(table_ptr + start // BLOCK_SIZE).to(tl.int64)
        base = block * stride_block + (start % BLOCK_SIZE) * WIDTH
        rows = token * WIDTH
    else:
        position = start + token
        if MASKED:
            seen = position_seen(position, begin, end, LOCAL)
            block = tl.load(table_ptr + position // BLOCK_SIZE, mask=seen, other=0)
        else:
            block = tl.load(table_ptr + position // BLOCK_SIZE)
        base = stride_block * 0
        rows = block.to(tl.int64) * stride_block + position % BLOCK_SIZE * WIDTH
    return base, rows


@triton.jit
def load_tile(
    ptr, base, rows, start, begin, end, dtype,
    WIDTH: tl.constexpr, PAD: tl.constexpr, FP8: tl.constexpr,
    MASKED: tl.constexpr, LOCAL: tl.constexpr,
):  # fmt: skip
    """Load the first WIDTH elements of TILE keys or values, [TILE, PAD], as `dtype`.

    Elements outside [begin, end) and in the padding are loaded as zeros, because a NaN there would survive a weight of
    0.
    """
    dim = tl.arange(0, PAD)
    offsets = rows[:, None] + dim[None, :]
    if MASKED:
        seen = position_seen(start + tl.arange(0, rows.shape[0]), begin, end, LOCAL)[:, None]
        if PAD != WIDTH:
            seen = seen & (dim < WIDTH)[None, :]
        x = tl.load(ptr + base + offsets, mask=seen, other=0.0)
    elif PAD != WIDTH:
        x = tl.load(ptr + base + offsets, mask=(dim < WIDTH)[None, :], other=0.0)
    else:
        x = tl.load(ptr + base + offsets)
    if FP8 == FP8_BITS:
        # The exponent bias is 7 in e4m3 and 15 in float16. So the bits, moved to float16's bit positions, are 2^-8
        # times the true value.
        bits = x.to(tl.uint16)
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        x = bits.to(tl.float16, bitcast=True) * 256.0
    return x.to(dtype)


@triton.jit
def load_query(
    ptr, offsets, valid, HEAD_DIM: tl.constexpr, KEY_PART: tl.constexpr, KEY_PAD: tl.constexpr, REST_PAD: tl.constexpr
):  # fmt: skip
    """Load the queries at `offsets` [M] as a tuple of parts like those of a key: [M, KEY_PAD], and [M, REST_PAD]."""
    first = _load_rows(ptr, offsets, valid, KEY_PART, KEY_PAD)
    if REST_PAD > 0:
        return first, _load_rows(ptr + KEY_PART, offsets, valid, HEAD_DIM - KEY_PART, REST_PAD)
    else:
        return (first,)


@triton.jit
def _load_rows(ptr, offsets, valid, WIDTH: tl.constexpr, PAD: tl.constexpr):
    """Load WIDTH elements at each of `offsets` [M]: [M, PAD], zeros where not valid."""
    dim = tl.arange(0, PAD)
    held = valid[:, None] & (dim < WIDTH)[None, :]
    return tl.load(ptr + offsets[:, None] + dim[None, :], mask=held, other=0.0)


@triton.jit
def load_keys_values(
    k_ptr, v_ptr, table_ptr, start, begin, end, stride_block, dtype,
    HEAD_DIM: tl.constexpr, KEY_PART: tl.constexpr, KEY_PAD: tl.constexpr, REST_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    FP8: tl.constexpr, MASKED: tl.constexpr, LOCAL: tl.constexpr,
):  # fmt: skip
    """Load keys and values of tokens [start, start + TILE) of one head as `dtype`.

    Returns the parts of the keys, a tuple of [TILE, KEY_PAD] and, if there is a rest, [TILE, REST_PAD]; and the values
    [TILE, VALUE_PAD]. Without `v_ptr` the values are the first part of the keys.
    """
    base, rows = tile_offsets(
        table_ptr, start, begin, end, stride_block, HEAD_DIM, BLOCK_SIZE, TILE, MASKED, LOCAL
    )
    first = load_tile(
        k_ptr, base, rows, start, begin, end, dtype, KEY_PART, KEY_PAD, FP8, MASKED, LOCAL
    )
    rest = None
    if REST_PAD > 0:
        rest = load_tile(
            k_ptr + KEY_PART, base, rows, start, begin, end, dtype,
            HEAD_DIM - KEY_PART, REST_PAD, FP8, MASKED, LOCAL,
        )  # fmt: skip
    v = first
    if v_ptr is not None:
        if VALUE_DIM != HEAD_DIM:
            base, rows = tile_offsets(
                table_ptr, start, begin, end, stride_block, VALUE_DIM, BLOCK_SIZE, TILE, MASKED, LOCAL
            )  # fmt: skip
        v = load_tile(
            v_ptr, base, rows, start, begin, end, dtype, VALUE_DIM, VALUE_PAD, FP8, MASKED, LOCAL
        )
    if REST_PAD > 0:
        return (first, rest), v
    else:
        return (first,), v


@triton.jit
def attend_tile(
    q, k, v, m, l, acc, seen, qk_scale, SOFTCAP: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Add one tile of keys to the online softmax (m, l, acc).

    q and k are tuples of one or two parts, [M, D] and [TILE, D] each. Shapes: v [TILE, V]; m and l [M], acc [M, V]
    float32. `seen` [M, TILE] is used where MASKED. `qk_scale` is f, or with SOFTCAP 2 * log2(e) * scale / SOFTCAP.
    """
    s = tl.dot(q[0], tl.trans(k[0]), input_precision="ieee")
    if len(q) > 1:
        s = tl.dot(q[1], tl.trans(k[1]), s, input_precision="ieee")
    if SOFTCAP > 0.0:
        # tanh(x) = 1 - 2 / (1 + e^2x): correct at both infinities without the branch of libdevice's tanh.
        s = (SOFTCAP * LOG2E) * (1.0 - 2.0 / (1.0 + tl.exp2(s * qk_scale)))
        factor = 1.0
    else:
        factor = qk_scale
    if MASKED:
        s = tl.where(seen, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * factor)
    if MASKED:
        # m_new is -inf where no key has been seen so far.
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    else:
        shift = m_new
    p = tl.exp2(tl.fma(s, tl.zeros_like(s) + factor, tl.broadcast_to(-shift[:, None], s.shape)))
    alpha = tl.exp2(m - shift)
    l = tl.fma(l, alpha, tl.sum(p, 1))
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return m_new, l, acc


@triton.jit
def merge(m, l, acc, m_next, l_next, acc_next):
    """Merge two partial results; merging with (-inf, 0, 0) leaves the other's bits unchanged."""
    m_new = tl.maximum(m, m_next)
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    a = tl.exp2(m - shift)
    b = tl.exp2(m_next - shift)
    l = tl.fma(l, a, l_next * b)
    acc = tl.fma(acc, tl.broadcast_to(a[:, None], acc.shape), acc_next * b[:, None])
    return m_new, l, acc


@triton.jit
def finish(m, l, acc, sink, v_scale):
    """Return the output [M, D]. The sink (logits [M], or None) is added to the denominator; no keys give zeros."""
    if sink is not None:
        sink = sink * LOG2E
        m_new = tl.maximum(m, sink)
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        a = tl.exp2(m - shift)
        l = tl.fma(l, a, tl.exp2(sink - shift))
        acc = acc * a[:, None]
    return acc / tl.where(l == 0.0, 1.0, l)[:, None] * v_scale


@triton.jit
def head_scales(k_scale_ptr, v_scale_ptr, head, qk_scale):
    """Return (qk_scale times the head's K scale, V scale); the pointers are None for a cache without scales."""
    v_scale = 1.0
    if k_scale_ptr is not None:
        qk_scale = qk_scale * tl.load(k_scale_ptr + head)
    if v_scale_ptr is not None:
        v_scale = tl.load(v_scale_ptr + head)
    return qk_scale, v_scale


def fp8_mode(dtype: torch.dtype, device: torch.device) -> int:
    """Value of the kernels' argument FP8 for a cache of `dtype` on `device`."""
    if dtype != torch.float8_e4m3fn:
        return FP8_NONE.value
    return (FP8_NATIVE if has_fp8_conversion(device) else FP8_BITS).value


def score_scale(scale: float, softcap: float | None) -> float:
    """Value of `attend_tile`'s argument `qk_scale`."""
    if softcap is None:
        return scale * LOG2E.value
    return 2.0 * LOG2E.value * scale / softcap
