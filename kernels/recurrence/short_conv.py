"""Causal depthwise convolution of each row, with the last inputs of its earlier tokens in a slot.

    out[t] = act(bias + sum_j weight[j] x[t - taps + 1 + j]),  0 <= j < taps,  act: SiLU or the identity

A program has all tokens of a row in some channels: it reads the slot before it writes it, so nothing is copied. It
computes TOKENS tokens at a time, each with one order of additions; so a token's bits depend neither on the batch nor
on how its row is divided into steps. Grid: rows, blocks of channels.

Layout. x [T, channels], any stride between tokens; weight [taps, channels]; states [slots, taps, channels], oldest
first, any stride between slots.

Bytes per row: 2 taps channels of the state, twice the tokens' channels. Flops: 2 taps a token and channel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.recurrence.recurrence_checks import check_conv
from quire.kernels.recurrence.recurrent_rows import RecurrentRows

CHANNELS = 128  # of a program
TOKENS = 4  # of one iteration
NUM_WARPS = 4


@triton.jit
def _inputs_at(
    x_ptr, state_ptr, at, begin, oldest, stride_x, channels, channel, held, TAPS: tl.constexpr
):  # fmt: skip
    """Inputs of tokens `at` [n], some before the row's first token `begin` in this step: [n, channels] float32.

    Entries of the slot before `oldest` are zeros.
    """
    in_step = at >= begin
    from_x = tl.load(
        x_ptr + at.to(tl.int64)[:, None] * stride_x + channel[None, :],
        mask=in_step[:, None] & held[None, :],
        other=0.0,
    ).to(tl.float32)
    place = TAPS + at - begin
    is_kept = (at < begin) & (place >= oldest)
    from_state = tl.load(
        state_ptr + place[:, None] * channels + channel[None, :],
        mask=is_kept[:, None] & held[None, :],
        other=0.0,
    ).to(tl.float32)
    return tl.where(in_step[:, None], from_x, from_state)


@triton.jit
def _keep_inputs(
    target_ptr, x_ptr, state_ptr, begin, end, oldest, stride_x, channels, channel, held,
    TAPS: tl.constexpr, PADDED_TAPS: tl.constexpr,
):  # fmt: skip
    """Store the last TAPS inputs before token `end` in the slot at `target_ptr`."""
    tap = tl.arange(0, PADDED_TAPS)
    inputs = _inputs_at(
        x_ptr, state_ptr, end - TAPS + tap, begin, oldest, stride_x, channels, channel,
        held, TAPS,
    )  # fmt: skip
    # The slot that is read may be the one that is written.
    tl.debug_barrier()
    tl.store(
        target_ptr + tap[:, None] * channels + channel[None, :],
        inputs.to(target_ptr.dtype.element_ty),
        mask=(tap < TAPS)[:, None] & held[None, :],
    )


@triton.jit
def _conv_kernel(
    out_ptr, x_ptr, weight_ptr, bias_ptr, states_ptr, cu_q_ptr, slots_ptr, kv_len_ptr,
    saves_ptr, first_save_ptr,
    stride_x, stride_slot, channels,
    TAPS: tl.constexpr, PADDED_TAPS: tl.constexpr, SILU: tl.constexpr, SAVES: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Convolve the tokens of one row in a block of channels."""
    row = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    held = channel < channels
    begin = tl.load(cu_q_ptr + row)
    end = tl.load(cu_q_ptr + row + 1)
    if end > begin:
        # A row without earlier tokens has no entry of the slot.
        oldest = tl.where(tl.load(kv_len_ptr + row) == end - begin, TAPS, 0)
        state_ptr = states_ptr + tl.load(slots_ptr + row) * stride_slot
        for first in range(begin, end, TOKENS):
            at = first + tl.arange(0, TOKENS)
            total = tl.zeros([TOKENS, CHANNELS], tl.float32)
            if bias_ptr is not None:
                total += tl.load(bias_ptr + channel, mask=held, other=0.0)[None, :]
            for j in tl.static_range(TAPS):
                inputs = _inputs_at(
                    x_ptr, state_ptr, tl.minimum(at, end - 1) - TAPS + 1 + j, begin, oldest,
                    stride_x, channels, channel, held, TAPS,
                )  # fmt: skip
                weight = tl.load(weight_ptr + j * channels + channel, mask=held, other=0.0)
                total += weight[None, :] * inputs
            if SILU:
                total = total / (1.0 + tl.exp(-total))
            tl.store(
                out_ptr + at.to(tl.int64)[:, None] * channels + channel[None, :],
                total.to(out_ptr.dtype.element_ty),
                mask=(at < end)[:, None] & held[None, :],
            )
        if SAVES:
            for save in range(tl.load(first_save_ptr + row), tl.load(first_save_ptr + row + 1)):
                count = tl.load(saves_ptr + 3 * save + 1).to(tl.int32)
                target_ptr = states_ptr + tl.load(saves_ptr + 3 * save + 2) * stride_slot
                _keep_inputs(
                    target_ptr, x_ptr, state_ptr, begin, begin + count, oldest, stride_x,
                    channels, channel, held, TAPS, PADDED_TAPS,
                )  # fmt: skip
        _keep_inputs(
            state_ptr, x_ptr, state_ptr, begin, end, oldest, stride_x, channels, channel, held,
            TAPS, PADDED_TAPS,
        )  # fmt: skip


def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    rows: RecurrentRows,
    silu: bool,
) -> torch.Tensor:
    """Convolve each channel with its last inputs; see `check_conv` for shapes.

    Returns
    -------
    [T, channels] in the dtype of x; undefined for tokens of no row.
    """
    check_conv(x, weight, bias, states, rows)
    x = x if x.stride(1) == 1 else x.contiguous()
    taps, channels = weight.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _conv_kernel[(rows.num_rows, triton.cdiv(channels, CHANNELS))](
        out, x, weight, bias, states, rows.cu_q, rows.slots, rows.kv_len, rows.saves,
        rows.first_save, x.stride(0), states.stride(0), channels,
        TAPS=taps, PADDED_TAPS=triton.next_power_of_2(taps), SILU=silu,
        SAVES=len(rows.saves) > 0, TOKENS=TOKENS, CHANNELS=CHANNELS,
        num_warps=NUM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return out
