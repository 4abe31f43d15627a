"""Embeds inputs: one request for each, which generates nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import numpy as np

from quire.protos.field_checks import at_most
from quire.router.bill import Bill
from quire.router.scoring.embedding_format import EmbeddingFormat
from quire.router.scoring.many_prompts import ManyPrompts, run_all
from quire.router.types import Embeddings, Explain, GenerationRequest, Usage

MAX_INPUTS = 2048  # as OpenAI


class PooledStream(Protocol):
    """The part of `RequestStream` that is used here."""

    @property
    def usage(self) -> Usage: ...

    @property
    def explain(self) -> Explain: ...

    @property
    def pooled(self) -> np.ndarray:
        """[hidden size] float32."""
        ...

    async def start(self) -> None: ...

    async def aclose(self) -> None: ...


class Embedder:
    """Embeds the inputs of one request.

    Parameters
    ----------
    prompts
        [tokens] int32 of each input.
    dimensions
        Number of values of an embedding; None: the hidden size.
    new_stream
        Makes the stream, not started, of a prompt.
    """

    def __init__(
        self,
        prompts: Sequence[np.ndarray],
        embedding: EmbeddingFormat,
        dimensions: int | None,
        new_stream: Callable[[np.ndarray], Awaitable[PooledStream]],
    ):
        self._prompts = prompts
        self._embedding = embedding
        self._dimensions = dimensions
        self._new_stream = new_stream
        self._vectors: dict[int, np.ndarray] = {}
        self._numbers = ManyPrompts(sum(map(len, prompts)))

    async def run(self, bill: Bill | None, clock: Callable[[], float]) -> Embeddings:
        """Embed all inputs, as one answer of the bill.

        Raises
        ------
        QuireError
            One of the requests was refused or failed; all others are ended.
        """
        return await self._numbers.billed(self._run, bill, clock)

    async def _run(self) -> Embeddings:
        indices = range(len(self._prompts))
        await run_all(indices, self._embed)
        vectors = [self._vectors[index] for index in indices]
        return Embeddings(vectors, self._numbers.usage, self._numbers.explain)

    async def _embed(self, index: int) -> None:
        stream = await self._new_stream(self._prompts[index])
        if index == 0:
            self._numbers.explain = stream.explain
        try:
            await stream.start()
            self._vectors[index] = self._embedding.finish(stream.pooled, self._dimensions)
            usage = self._numbers.usage
            usage.cached_tokens += stream.usage.cached_tokens
            usage.host_cached_tokens += stream.usage.host_cached_tokens
            usage.peer_cached_tokens += stream.usage.peer_cached_tokens
        finally:
            await stream.aclose()


def check_num_inputs(request: GenerationRequest) -> None:
    """Check the number of a request's prompts; raises `InvalidRequest`."""
    at_most("prompt", len(request.prompts), MAX_INPUTS, "inputs")
