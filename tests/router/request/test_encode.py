"""A prompt is shown as a replica would get it; token ids become text; neither needs a place in a queue."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from engine_transport import EngineTransport, make_service
from family_templates import GPT_OSS
from tokenizers import Tokenizer

from quire.protos.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    ModelNotFound,
    Unavailable,
    UnsupportedField,
)
from quire.router.request.service import RouterService
from quire.router.text.chat_template import ChatTemplate
from quire.router.text.tokenizer import TextTokenizer
from quire.router.types import EncodedPrompt, GenerationRequest

TEMPLATE = """{%- for m in messages %}<s>{{ m.role }} {{ m.content }}</s>{% endfor %}
{%- if add_generation_prompt %}<s>assistant{% endif %}"""
HI = ({"role": "user", "content": "hi there"},)


@pytest.fixture(scope="module")
def transport() -> Iterator[EngineTransport]:
    transport = EngineTransport()
    yield transport
    transport.engine.check()
    transport.engine.close()


@pytest.fixture
def tokenizer(byte_fallback: Tokenizer) -> TextTokenizer:
    """It adds BOS, <s>."""
    return TextTokenizer(byte_fallback, {"bos_token": "<s>", "eos_token": "</s>"})


def with_service(
    transport: EngineTransport,
    tokenizer: TextTokenizer,
    work: Callable[[RouterService], Awaitable[Any]],
) -> Any:
    async def main() -> Any:
        template = ChatTemplate(TEMPLATE, tokenizer.special_tokens)
        return await work(make_service(transport, tokenizer=tokenizer, template=template))

    return asyncio.run(asyncio.wait_for(main(), 60))


def asked(**fields: Any) -> GenerationRequest:
    return GenerationRequest(request_id="r", max_tokens=1, **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "hello world"},
        {"prompt": "hello world", "add_special_tokens": False},
        {"prompt": "<s>hello"},
        {"prompt": ""},
        {"prompt": "hello world " * 30},
        {"prompt": (5, 6, 7)},
        {"messages": HI},
        {"messages": HI, "add_generation_prompt": False},
        {"messages": ({"role": "user", "content": "hi</s><s>system"},)},
    ],
)
def test_the_encoded_prompt_is_that_of_a_replica(transport, tokenizer, fields) -> None:
    async def work(service: RouterService) -> EncodedPrompt:
        encoded = await service.encode(asked(**fields))
        assert transport.submits == []
        stream = await service.generate(asked(**fields))
        async for _ in stream:
            pass
        await stream.aclose()
        return encoded

    encoded = with_service(transport, tokenizer, work)
    assert encoded.token_ids.tolist() == transport.submits[0].prompt_ids.tolist()
    assert encoded.max_model_len == 512


def test_the_text_is_the_rendered_template(transport, tokenizer) -> None:
    async def work(service: RouterService) -> list[str | None]:
        requests = (
            asked(messages=HI),
            asked(messages=({"role": "user", "content": "a</s>b"},)),
            asked(prompt="hello"),
            asked(prompt=(5, 6)),
        )
        return [(await service.encode(request)).text for request in requests]

    assert with_service(transport, tokenizer, work) == [
        "<s>user hi there</s><s>assistant",
        "<s>user a</s>b</s><s>assistant",
        "hello",
        None,
    ]


def test_reasoning_reaches_the_template_under_its_own_name(transport, tokenizer) -> None:
    """gpt-oss, for instance, reads `thinking`."""

    async def main() -> str | None:
        template = ChatTemplate(GPT_OSS, tokenizer.special_tokens)
        service = make_service(transport, tokenizer=tokenizer, template=template)
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        answer = {"role": "assistant", "reasoning_content": "Why.", "tool_calls": [call]}
        return (await service.encode(asked(messages=(*HI, answer)))).text

    text = asyncio.run(asyncio.wait_for(main(), 60))
    assert text is not None and "analysis<|message|>Why.<|end|>" in text


@pytest.mark.parametrize(
    ("fields", "error", "field"),
    [
        ({"prompt": "x", "model": "other"}, ModelNotFound, "model"),
        ({"prompt": "x", "temperature": -1.0}, InvalidRequest, "temperature"),
        ({"prompt": "x" * 9000}, ContextLengthExceeded, "prompt"),
        ({"messages": ()}, InvalidRequest, "messages"),
        (
            {"messages": ({"role": "user", "content": "a", "odd": 1},)},
            UnsupportedField,
            "messages[0].odd",
        ),
    ],
)
def test_what_generate_refuses_is_refused(transport, tokenizer, fields, error, field) -> None:
    async def work(service: RouterService) -> None:
        for call in (service.encode, service.generate):
            with pytest.raises(error) as caught:
                await call(asked(**fields))
            assert caught.value.field == field

    with_service(transport, tokenizer, work)


def test_a_base_models_chat_is_refused_with_advice(transport, tokenizer) -> None:
    async def main() -> None:
        service = make_service(transport, tokenizer=tokenizer, has_template=False)
        assert (await service.encode(asked(prompt="hello"))).text == "hello"
        for call in (service.encode, service.generate):
            with pytest.raises(
                UnsupportedField, match=r"/v1/completions, or .* chat_template"
            ) as caught:
                await call(asked(messages=HI))
            assert caught.value.field == "messages"

    asyncio.run(asyncio.wait_for(main(), 60))


def test_encoding_needs_a_replica_and_no_place_in_a_queue(transport, tokenizer) -> None:
    async def work(service: RouterService) -> None:
        def full(*args: Any) -> None:
            raise AssertionError("the queue was asked")

        service.gate = SimpleNamespace(check=full)
        assert len((await service.encode(asked(prompt="hello"))).token_ids)
        service.transport = SimpleNamespace(hellos={})
        with pytest.raises(Unavailable):
            await service.encode(asked(prompt="hello"))
        assert await service.decode([260], skip_special_tokens=False)  # the tokenizer is here

    with_service(transport, tokenizer, work)


def test_token_ids_become_text_and_tokens(transport, tokenizer) -> None:
    async def work(service: RouterService) -> None:
        ids = (await service.encode(asked(prompt="hello é"))).token_ids.tolist()
        assert await service.decode(ids, skip_special_tokens=True) == "hello é"
        assert await service.decode(ids, skip_special_tokens=False) == "<s> hello é"
        tokens = await service.tokens(ids)
        assert tokens[0] == "<s>" and tokens[-2:] == ["<0xC3>", "<0xA9>"]
        assert await service.decode(ids[:-1], skip_special_tokens=True) == "hello \ufffd"
        assert await service.decode([], skip_special_tokens=True) == ""
        vocab_size = tokenizer.vocab_size
        for wrong in (vocab_size, -1, True, 1.5):
            with pytest.raises(InvalidRequest) as caught:
                await service.decode([1, wrong], skip_special_tokens=True)  # type: ignore[list-item]
            assert caught.value.field == "tokens[1]"

    with_service(transport, tokenizer, work)
