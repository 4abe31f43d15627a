"""Embeddings on a real engine: exact, the same in any company and on another replica, ended with their client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from engine_transport import EngineTransport, make_service

from quire.protos.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    UnsupportedField,
)
from quire.replica.builtin_model import CHECKPOINT
from quire.router.bill import BilledAnswer
from quire.router.request.service import RouterService
from quire.router.scoring.embedder import MAX_INPUTS
from quire.router.scoring.embedding_format import EmbeddingFormat
from quire.router.scoring.many_prompts import MAX_AT_ONCE
from quire.router.transport.transport import Lost
from quire.router.types import GenerationRequest

MAX_LEN = 512  # of the transport's engine
INPUTS = ("A harbour at night.", "The lighthouse", (5, 9, 300, 7), "Sand and rain. " * 40)
MEAN = EmbeddingFormat("mean", normalises=False)


@pytest.fixture(scope="module")
def transport() -> Iterator[EngineTransport]:
    transport = EngineTransport()
    yield transport
    transport.engine.check()
    transport.engine.close()


def run(
    transport: EngineTransport, body: Callable[[RouterService], Awaitable[Any]], **facts
) -> Any:
    async def main() -> Any:
        return await asyncio.wait_for(body(make_service(transport, **facts)), 60)

    return asyncio.run(main())


def request(*inputs: str | tuple[int, ...], **fields: Any) -> GenerationRequest:
    given = {"prompt": inputs[0]} if len(inputs) == 1 else {"prompts": inputs}
    return GenerationRequest(request_id="r", max_tokens=1, **given, **fields)


@pytest.mark.parametrize("embedding", [EmbeddingFormat(), MEAN])
def test_embeddings_are_those_of_transformers(transport, embedding) -> None:
    found = run(
        transport, lambda service: service.embed(request(*INPUTS), None), embedding=embedding
    )
    model = transformers.AutoModel.from_pretrained(CHECKPOINT, dtype=torch.float32)
    num_tokens = 0
    for submit, vector in zip(transport.submits, found.vectors, strict=True):
        num_tokens += len(submit.prompt_ids)
        with torch.inference_mode():
            ids = torch.tensor(submit.prompt_ids, dtype=torch.int64)[None]
            hidden = model(ids).last_hidden_state[0].double()
        expected = (hidden.mean(0) if embedding is MEAN else hidden[-1]).numpy()
        length = np.linalg.norm(expected)
        assert expected @ vector / length / np.linalg.norm(vector) >= 0.999999
        assert np.linalg.norm(vector) == pytest.approx(length if embedding is MEAN else 1, rel=1e-4)
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (num_tokens, 0)
    assert found.explain.answered


@pytest.mark.parametrize("embedding", [EmbeddingFormat(), MEAN])
def test_embeddings_have_the_same_bits_alone_in_company_and_after_a_loss(
    transport, embedding, monkeypatch
) -> None:
    inputs = tuple(f"{embedding.pooling} {i} " * (1 + 9 * i) for i in range(12))
    lost: list[int] = []
    submit = transport.submit

    def losing(given, route):
        """Every fifth attempt is lost before it has a frame."""
        attempt = submit(given, route)
        if len(transport.submits) % 5 == 0:
            lost.append(given.stream_id)
            transport._attempts.pop(given.stream_id)
            attempt.put(Lost(attempt.replica, "lost on purpose"))
        return attempt

    async def body(service: RouterService) -> None:
        batch = await service.embed(request(*inputs), None)
        assert batch.usage.cached_tokens == 0
        expected = [vector.tobytes() for vector in batch.vectors]
        strangers = [
            await service.generate(
                GenerationRequest(request_id="s", prompt="The tide", max_tokens=60, seed=seed)
            )
            for seed in range(3)
        ]
        for text, bits in zip(inputs, expected, strict=True):
            alone = await service.embed(request(text), None)
            assert [vector.tobytes() for vector in alone.vectors] == [bits]
        # A long input is found in the cache if only its last token's hidden state is read.
        assert (alone.usage.cached_tokens > 64) == (embedding.pooling == "last")
        for stranger in strangers:
            await stranger.aclose()
        monkeypatch.setattr(transport, "submit", losing)
        again = await service.embed(request(*inputs), None)
        assert [vector.tobytes() for vector in again.vectors] == expected
        assert len(lost) >= 2

    run(transport, body, embedding=embedding)


def test_dimensions_and_a_default_prompt(transport) -> None:
    async def body(service: RouterService) -> None:
        whole, cut, written, _ = [
            (await service.embed(request(text), dimensions)).vectors[0]
            for text, dimensions in (("sand", None), ("sand", 8), ("Q: sand", 8), ((5, 6), 8))
        ]
        assert len(whole) == transport.engine.hello("r1").hidden_size
        np.testing.assert_allclose(cut, whole[:8] / np.linalg.norm(whole[:8]), rtol=1e-6)
        assert not np.array_equal(cut, written)
        prompts = [submit.prompt_ids.tolist() for submit in transport.submits]
        assert prompts[2][-len(prompts[0]) + 2 :] == prompts[0][2:] and prompts[3] == [5, 6]
        plain = make_service(transport)
        assert np.array_equal((await plain.embed(request("Q: sand"), 8)).vectors[0], cut)

    run(transport, body, embedding=EmbeddingFormat(prompt="Q: "))


class Calls(list):
    """A `Bill` that records its calls."""

    tenant = "team"

    def begin(self, num_prompt_tokens: int, num_answers: int) -> None:
        self.append((num_prompt_tokens, num_answers))

    def end(self, answer: BilledAnswer) -> None:
        self.append(answer)


def test_the_bill_is_that_of_one_answer_and_a_client_that_leaves_ends_all(transport) -> None:
    async def body(service: RouterService) -> None:
        bill = Calls()
        found = await service.embed(request(*INPUTS, bill=bill), None)
        begun, answer = bill
        assert begun == (found.usage.prompt_tokens, 1)
        assert (answer.finish_reason, answer.is_answered, answer.completion_tokens) == (
            *("stop", True, 0),
        )
        bill.clear()
        with pytest.raises(DeadlineExceeded):
            await service.embed(request(*INPUTS, bill=bill, deadline_s=1e-9), None)
        assert (bill[-1].finish_reason, bill[-1].is_answered) == ("error", False)

        bill.clear()
        transport.submits.clear()
        many = tuple(f"{i} o'clock" for i in range(300))
        task = asyncio.ensure_future(service.embed(request(*many, bill=bill), None))
        peak = 0
        while len(transport.submits) < 60:
            await asyncio.sleep(0.001)
            peak = max(peak, len(transport._attempts))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert 2 <= peak <= MAX_AT_ONCE
        assert not transport._attempts and len(transport.submits) < 300
        assert (bill[-1].finish_reason, len(bill)) == ("abort", 2)

    run(transport, body)


def test_bad_requests_are_refused_before_anything_is_sent(transport) -> None:
    vocab = transport.engine.config.vocab_size
    long = tuple([5] * (MAX_LEN + 1))

    async def body(service: RouterService) -> None:
        refusals: list[tuple[GenerationRequest, int | None, type[Exception], str]] = [
            (request("a"), 0, InvalidRequest, "dimensions must be .*, got 0"),
            (request("a", model="other"), None, Exception, "other"),
            (request("a", deadline_s=-1.0), None, DeadlineExceeded, "deadline"),
            (
                *(request(long), None, ContextLengthExceeded),
                rf"prompt: {MAX_LEN + 1} tokens; the model takes at most {MAX_LEN}",
            ),
            (
                *(request("a", "word, " * 600), None, ContextLengthExceeded),
                rf"prompt\[1\]: \d+ tokens; the model takes at most {MAX_LEN}",
            ),
            (request("a", (vocab,)), None, InvalidRequest, rf"prompt\[1\].*{vocab}"),
            (request(*["a"] * (MAX_INPUTS + 1)), None, InvalidRequest, f"at most {MAX_INPUTS}"),
        ]
        for asked, dimensions, error, message in refusals:
            with pytest.raises(error, match=message):
                await service.embed(asked, dimensions)
        assert not transport.submits
        (vector,) = (await service.embed(request(long[1:]), 4)).vectors
        assert len(vector) == 4

    run(transport, body)

    async def refused(service: RouterService) -> None:
        with pytest.raises(UnsupportedField, match="embeddings are not served: no Dense"):
            await service.embed(request("a"), None)

    run(transport, refused, embedding=EmbeddingFormat(refusal="no Dense"))
