"""From a step's logits to its tokens and log-probabilities by torch on a CPU, whatever its rows ask for.

What a GPU does instead: `device_sampler.py`.
"""

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
    """Owns the token counts of penalties, and the thread that fills grammars' masks.

    Parameters
    ----------
    vocab_size
        Columns of the logits.
    """

    def __init__(self, vocab_size: int):
        self._token_counts = TokenCounts(vocab_size)
        # Grammars take their time for a large vocabulary: they have that of the forward pass, which on the CPU
        # keeps the engine's thread.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="quire-masks")

    def begin(self, batch: SamplingBatch) -> Masks:
        """The step is about to be launched: have its masks filled meanwhile."""
        return self._thread.submit(fill_masks, batch.grammars) if batch.grammars else None

    def sample(
        self,
        logits: torch.Tensor,
        batch: SamplingBatch,
        masks: Masks,
        scores: torch.Tensor,
        choose: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Part of a step's work, on a CPU.

        Parameters
        ----------
        logits
            [S, vocab] float32; overwritten.
        masks
            As `begin` returned them.
        scores
            [max rows, SCORE_COLUMNS] float32, gets the log-probabilities of the rows that ask, from the first on.
        choose
            As of `sampler.sample`.

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
