"""Reference implementations in plain torch and float32, written for clarity. Tests compare the kernels with them."""

from __future__ import annotations

import torch


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_q: torch.Tensor,
    kv_len: torch.Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    chunk: int | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute causal attention over paged keys, row by row.

    Takes the arguments of `quire.kernels.cpu.cpu_attention.paged_attention`. `k_scale` and `v_scale` [kv_heads]
    multiply the values stored in the cache. Returns [tokens, heads, elements of a value] float32, zeros where kv_len
    is 0.
    """
    _, kv_heads, block_size, _ = k_cache.shape
    heads = q.shape[1]
    out = torch.empty(*q.shape[:2], v_cache.shape[3], dtype=torch.float32, device=q.device)
    for row in range(len(kv_len)):
        start, end, length = int(cu_q[row]), int(cu_q[row + 1]), int(kv_len[row])
        # Keys before the first query's window or chunk may have been evicted: their table entries are not valid.
        first = max(length - (end - start), 0)
        reach = [first - window + 1] if window else []
        reach += [first // chunk * chunk] if chunk else []
        first = max([0, *reach]) if reach else 0
        pages = block_tables[row, first // block_size : -(-length // block_size)].long()
        skipped = first - first // block_size * block_size
        # [blocks, kv_heads, block_size, d] -> [kv_heads, tokens, d] -> [heads, tokens, d]
        k, v = (
            cache[pages].float().transpose(0, 1).reshape(kv_heads, -1, cache.shape[3])
            for cache in (k_cache, v_cache)
        )
        k, v = (x[:, skipped : skipped + length - first] for x in (k, v))
        if k_scale is not None and v_scale is not None:
            k, v = k * k_scale.view(-1, 1, 1), v * v_scale.view(-1, 1, 1)
        k, v = (x.repeat_interleave(heads // kv_heads, dim=0) for x in (k, v))
        scores = torch.einsum("qhd,hkd->hqk", q[start:end].float(), k) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        query = torch.arange(length - (end - start), length, device=q.device)[:, None]
        key = torch.arange(first, length, device=q.device)[None]
        hidden = key > query
        if window is not None:
            hidden = hidden | (key <= query - window)
        if chunk is not None:
            hidden = hidden | (key < query // chunk * chunk)
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            column = sinks.float().view(heads, 1, 1).expand(heads, end - start, 1)
            scores = torch.cat([scores, column], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : length - first]
        out[start:end] = torch.einsum("hqk,hkd->qhd", weights, v)
    return out


def uniform_noise(token_id: int, key_low: int, key_high: int) -> float:
    """The uniform number of `quire.kernels.sampling.noise` for one token, computed with Python integers."""

    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x85EBCA6B & 0xFFFFFFFF
        x ^= x >> 13
        x = x * 0xC2B2AE35 & 0xFFFFFFFF
        return x ^ x >> 16

    x = mix((token_id * 0x9E3779B1 + key_low) & 0xFFFFFFFF) ^ key_high
    return ((mix(x) >> 9) + 0.5) * 2.0**-23


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, gemma: bool = False
) -> torch.Tensor:
    """x / rms(x) * weight (Gemma: * (1 + weight)) for each row, in float32 without intermediate rounding."""
    y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return y * (1 + weight.float() if gemma else weight.float())


def rotate(
    x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """Rotary embedding in the half-split layout: x [tokens, heads, head_dim]; cos, sin [positions, rotary_dim]."""
    x, rest = x.float().split([cos.shape[1], x.shape[2] - cos.shape[1]], dim=-1)
    low, high = x.chunk(2, dim=-1)
    rotated = torch.cat([-high, low], dim=-1)
    cos, sin = (table[positions.long()][:, None] for table in (cos, sin))
    return torch.cat([x * cos + rotated * sin, rest], dim=-1)


def quantise_e4m3(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, head_dim] / scale [heads], clamped to +-448, as float8_e4m3fn."""
    return (x.float() / scale[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)


def quantise_rows(x: torch.Tensor, bound: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise x [rows, n] to codes [rows, n] float8_e4m3fn with one scale per row, [rows, 1].

    The formula is in `kernels.rows.fp8_rows`. Magnitudes above `bound`, which may be infinite, are clamped to it.
    """
    codes, scales = [], []
    for row in x.float():
        scale = row.abs().max().clamp(max=bound) / 448
        scales.append(scale if scale > 0 else torch.ones(()))
        codes.append((row / scales[-1]).clamp(-448, 448).to(torch.float8_e4m3fn))
    return torch.stack(codes), torch.stack(scales)[:, None]


def write_slots(cache: torch.Tensor, x: torch.Tensor, slots: torch.Tensor) -> None:
    """Store x [tokens, kv_heads, head_dim] at `slots` of a cache [blocks, kv_heads, block_size, head_dim].

    A token with slot -1 is not stored.
    """
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, cache.shape[2])
            cache[block, :, offset] = x[token].to(cache.dtype)


def gated(gate_up: torch.Tensor, *, gelu: bool) -> torch.Tensor:
    """silu(gate) * up, or gelu_tanh(gate) * up, in float32."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    activate = torch.nn.functional.gelu if gelu else torch.nn.functional.silu
    return (activate(gate, approximate="tanh") if gelu else activate(gate)) * up


def edit_logits(
    logits: torch.Tensor,
    mask: torch.Tensor | None,
    ids: torch.Tensor,
    bias: torch.Tensor,
    states: torch.Tensor | None,
    repetition: float,
    presence: float,
    frequency: float,
) -> torch.Tensor:
    """Apply mask, bias and penalties, in this order, to one row of logits [vocab] (`kernels.sampling.logit_edits`)."""
    logits = logits.float().clone()
    for token_id in range(len(logits)):
        if mask is not None and not int(mask[token_id // 32]) >> token_id % 32 & 1:
            logits[token_id] = float("-inf")
    logits[ids.long()] += bias
    if states is not None:
        count = states & (1 << 30) - 1
        factor = torch.tensor(repetition)
        repeated = torch.where(logits > 0, logits / factor, logits * factor)
        logits = torch.where(states != 0, repeated, logits)
        logits -= torch.tensor(frequency) * count
        logits -= torch.tensor(presence) * (count > 0)
    return logits


def kept_ids(
    logits: torch.Tensor, top_k: int, top_p: float, min_p: float
) -> tuple[list[int], float]:
    """Apply min-p, top-k and top-p (in that order) to one row [vocab] of logits divided by the temperature.

    Of equal logits the smaller id comes first. Sums are float64.

    Returns
    -------
    The kept ids by falling probability, and the smallest relative distance between p and a cumulative sum. If it is
    below 1e-5, top-p may keep one token more or less when the sums are added in another order.
    """
    x = logits.double()
    values, order = x.sort(descending=True, stable=True)
    count = int((values > float("-inf")).sum())
    if min_p > 0 and count:
        count = int((values[:count] >= values[0] + torch.tensor(min_p).double().log()).sum())
    count = min(count, top_k) if top_k > 0 else count
    margin = 1.0
    if top_p < 1.0 and count:
        before = torch.softmax(values[:count], dim=0).cumsum(0)
        margin = float((before / top_p - 1).abs().min())
        count = min(int((before < top_p).sum()) + 1, count)
    return order[:count].tolist(), margin


def pack_limits(*columns: torch.Tensor) -> torch.Tensor:
    """[rows, 4] int32 of columns [rows] in the order of `sampling_tile.LIMITS`."""
    return torch.stack([column.view(torch.int32) for column in columns], 1)
