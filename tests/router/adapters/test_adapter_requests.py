"""Requests that name an adapter as their model, over a real engine: tokens, namespace, failover, resumption."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quire.protos.errors import InvalidRequest, ModelNotFound
from quire.protos.sampling_params import SamplingParams
from quire.replica.builtin_model import CHECKPOINT
from quire.replica.engine import Engine
from quire.router.request import resume
from quire.router.types import GenerationRequest

sys.path.append(str(Path(__file__).parents[2] / "replica"))  # for `adapter_folders`
sys.path.append(str(Path(__file__).parents[1]))  # for `engine_transport`

from adapter_folders import save_adapter
from engine_transport import EngineTransport, make_service

PROMPT = tuple(range(5, 105))
NUM_TOKENS = 6


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for name, seed in (("x", 1), ("y", 2)):
        save_adapter(root / name, CHECKPOINT, seed=seed, size=0.5)
    return root


@pytest.fixture(scope="module")
def transport():
    transport = EngineTransport(max_loaded_adapters=2)
    yield transport
    transport.engine.close()


@pytest.fixture(scope="module")
def expected(root) -> dict[str, list[int]]:
    """Tokens of the engine alone, by name of the model."""
    from quire.protos.adapter_ref import AdapterRef

    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    with Engine(num_blocks=256, max_model_len=512, num_threads=1, max_loaded_adapters=2) as engine:
        found = {"embedded": engine.generate([list(PROMPT)], params, progress=False)}
        for name in ("x", "y"):
            adapter = engine.adapter(AdapterRef.of_folder(name, str(root / name)))
            found[name] = engine.generate([list(PROMPT)], params, adapter=adapter, progress=False)
    return {name: outputs[0].token_ids for name, outputs in found.items()}


def service_of(transport, root):
    service = make_service(transport)
    control = service.adapter_control
    control._folder = root
    return service


def asked(model: str | None, **options) -> GenerationRequest:
    return GenerationRequest(
        request_id="r", model=model, prompt=PROMPT, max_tokens=NUM_TOKENS, temperature=0.0,
        ignore_eos=True, **options,
    )  # fmt: skip


async def tokens_of(stream) -> list[int]:
    return [token for delta in [d async for d in stream] for token in delta.token_ids]


def test_the_model_of_a_request_chooses_its_adapter(transport, root, expected):
    async def run() -> None:
        service = service_of(transport, root)
        for name in ("x", "y"):
            await service.load_adapter(name, name)
        assert [entry.ref.name for entry in service.adapters()] == ["x", "y"]
        for model in ("x", None, "y", "embedded"):
            stream = await service.generate(asked(model))
            assert stream.model == (model or "embedded")
            assert await tokens_of(stream) == expected[model or "embedded"], model
        digests = [s.adapter and s.adapter.digest for s in transport.submits]
        assert len(set(digests)) == 3 and digests[1] is digests[3] is None

    asyncio.run(run())
    assert len({tuple(tokens) for tokens in expected.values()}) == 3


def test_requests_with_an_adapter_go_to_the_replica_that_was_sent_it_first(transport, root):
    async def run() -> None:
        service = service_of(transport, root)
        await service.load_adapter("x", "x")
        replicas = {"x": [], None: []}
        for i in range(8):
            for model, found in replicas.items():
                # Prompts without a common block: no replica holds a prefix.
                prompt = tuple(range(5 + i, 45 + i))
                stream = await service.generate(replace(asked(model), prompt=prompt))
                await tokens_of(stream)
                (score, *others) = service.ring.snapshot()[-1].ranking
                found.append(score.replica)
                costs_s = [other.terms["adapter_s"] for other in others]
                if model is None:
                    assert set(costs_s) == {score.terms["adapter_s"]} == {0.0}
                elif i > 0:
                    assert score.terms["adapter_s"] == 0.0 < min(costs_s)
        assert len(set(replicas["x"])) == 1 < len(set(replicas[None]))

    asyncio.run(run())


def test_a_stream_that_loses_its_replica_keeps_its_adapter_even_if_it_was_unloaded(
    transport, root, expected
):
    async def run() -> None:
        service = service_of(transport, root)
        await service.load_adapter("x", "x")
        transport.lose_after[:] = [2]
        stream = await service.generate(asked("x"))
        await service.unload_adapter("x")
        assert await tokens_of(stream) == expected["x"]
        assert len(transport.submits) == 2
        assert transport.submits[0].adapter == transport.submits[1].adapter != None  # noqa: E711
        with pytest.raises(ModelNotFound, match="must be one of 'embedded', got 'x'"):
            await service.generate(asked("x"))

    asyncio.run(run())


def test_routing_hashes_and_event_ids_depend_on_the_adapter(transport, root):
    async def run() -> None:
        service = service_of(transport, root)
        await service.load_adapter("x", "x")
        hello = service._hello()
        plain, adapted = asked(None), service._check(asked("x"))
        hashes = [
            await service._prompt_encoder.hashes(
                np.array(PROMPT, np.int32), hello, service.namespace(request)
            )
            for request in (plain, adapted, service._check(asked("x", tenant="t")))
        ]
        assert len(hashes[0]) == 1 and len({int(h[0]) for h in hashes}) == 3
        stream = await service.generate(adapted)
        event_ids = resume.EventIds(stream.origin, adapted.marks)
        last = [event_ids.after(delta) async for delta in stream][-1]
        await service.load_adapter("x", "y")
        point = resume.parse(last, "Last-Event-ID")
        with pytest.raises(InvalidRequest, match="belongs to another request"):
            await service.generate(asked("x", resume_from=point))

    asyncio.run(run())
