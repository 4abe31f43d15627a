"""Samples tokens and log-probabilities of a step with torch, on a CPU. GPUs use `runner/device_sampler.py`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from quire.replica.core.step_plan import SamplingBatch
from quire.replica.sampling.logprobs import log_distribution, score_tokens
from quire.replica.sampling.sampler import fill_masks, sample
from quire.replica.sampling.token_counts import TokenCounts

Masks = Future[np.ndarray] | None


class StepSampler:
    """Owns the token counts for penalties and the thread that computes grammar masks.

    Parameters
    ----------
    vocab_size
        Number of columns of the logits.
    """

    def __init__(self, vocab_size: int):
        self._token_counts = TokenCounts(vocab_size)
        # Masks of a large vocabulary take long. A thread computes them during the forward pass, which on the CPU
        # occupies the engine's thread.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="quire-masks")

    def begin(self, batch: SamplingBatch) -> Masks:
        """Start computing the grammar masks of a step that is about to be launched; None if no row has a grammar."""
        return self._thread.submit(fill_masks, batch.grammars) if batch.grammars else None

    def sample(
        self,
        logits: torch.Tensor,
        batch: SamplingBatch,
        masks: Masks,
        scores: torch.Tensor,
        choose: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Sample a step's tokens, and compute their log-probabilities if rows ask for them.

        Parameters
        ----------
        logits
            [S, vocab] float32; overwritten.
        masks
            Result of `begin`.
        scores
            [max rows, SCORE_COLUMNS] float32. Entry i receives the log-probabilities of the i-th row that asked.
        choose
            Samples tokens [S] int64 from the final logits; None: torch samples with the batch's options.

        Returns
        -------
        [S] int64 tokens.
        """
        distribution = log_distribution(logits, batch)
        filled = None if masks is None else masks.result()
        tokens = sample(logits, batch, self._token_counts, filled, choose)
        if distribution is not None:
            score_tokens(distribution, batch, tokens, scores)
        return tokens
