"""Calls of the sampling kernels that several tests share."""

from __future__ import annotations

import numpy as np
import torch

from quire.kernels.sampling.logit_edits import Edits, edit_logits
from quire.kernels.sampling.noise import noise_keys
from quire.kernels.sampling.row_survey import SamplingConfig
from quire.kernels.sampling.sampling_kernel import sample_tokens
from tests.kernels.compile.interpreter import kernel_device
from tests.kernels.reference import pack_limits

DEVICE = kernel_device()
# Small parts, and lists that are often too short, so that small vocabularies take every path.
CONFIG = SamplingConfig(chunk=16, part_chunks=2, part_slots=16, tile=64, pivots=16, num_warps=4)


def keys_of(rows, seed=0):
    return noise_keys(np.full(rows, seed, np.uint64), np.zeros(rows, int), np.arange(rows))


def choose(
    logits,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    keys=None,
    config=CONFIG,
    mask=None,
    **options,
):
    """Call `sample_tokens` with parameters from numbers or lists, and with a mask of the edited rows."""
    rows = len(logits)
    if mask is not None:
        options |= dict(
            edited=edit_logits(logits, masked(mask, logits.shape[1])), source=-1 - ids(*range(rows))
        )

    def column(value, dtype):
        values = value if isinstance(value, list) else [value] * rows
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    keys = keys_of(rows) if keys is None else keys
    limits = pack_limits(
        column(temperature, torch.float32), column(top_k, torch.int32),
        column(top_p, torch.float32), column(min_p, torch.float32),
    )  # fmt: skip
    keys = torch.from_numpy(keys.view(np.int64)).to(DEVICE)
    return sample_tokens(logits, limits, keys, config=config, **options)


def ids(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def masked(mask, vocab):
    """Edits that apply only a packed mask to all rows."""
    rows = len(mask)
    every, none, off = ids(*range(rows)), ids(*[-1] * rows), torch.zeros(rows, device=DEVICE)
    return Edits(
        every, mask, every, ids(*[0] * (rows + 1)), ids(), torch.empty(0, device=DEVICE),
        none, off + 1, off, off, mask.new_empty(0, vocab),
    )  # fmt: skip


def packed(allowed):
    """[rows, vocab] bool to the packed mask."""
    rows, vocab = allowed.shape
    bits = np.zeros((rows, -(-vocab // 32) * 32), bool)
    bits[:, :vocab] = allowed.cpu().numpy()
    words = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    return torch.from_numpy(words.copy()).to(DEVICE)


def draw_rows(rows, vocab, dtype=torch.float32, spread=3.0, seed=0, levels=0):
    """Random logits; with `levels` > 0 few different values, and so many ties."""
    x = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread
    if levels:
        x = (x / spread * levels / 2).round() * spread / levels
    return x.to(dtype).to(DEVICE)
