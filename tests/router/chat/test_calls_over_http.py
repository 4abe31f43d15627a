"""Tool calls from OpenAI's client to a real engine and back: the client, HTTP, the router, the embedded model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import httpx
import openai
import pytest
from engine_transport import EngineTransport, make_service

from quire.cluster.http.http_api import build_app

CITY = {"type": "string", "enum": ["Oslo", "Bergen"]}
WEATHER = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": CITY},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
ASKED = {
    "model": "embedded",
    "tools": [{"type": "function", "function": WEATHER}],
    "parallel_tool_calls": False,
    "max_tokens": 100,
    "seed": 3,
}
QUESTION = {"role": "user", "content": "Is it raining in Oslo?"}


@pytest.fixture(scope="module")
def transport() -> Iterator[EngineTransport]:
    transport = EngineTransport()
    yield transport
    transport.engine.check()
    transport.engine.close()


def test_a_call_is_asked_for_made_and_answered(transport: EngineTransport) -> None:
    async def main() -> None:
        service = make_service(transport)
        app = build_app(lambda: service, max_body_bytes=1 << 20)
        url = "http://quire/v1"
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=url) as http:
            client = openai.AsyncOpenAI(base_url=url, api_key="none", http_client=http)
            chats = client.chat.completions
            asked = {**ASKED, "messages": [QUESTION], "tool_choice": "required"}
            whole = (await chats.create(**asked)).choices[0]
            async with chats.stream(**asked) as stream:
                (streamed,) = (await stream.get_final_completion()).choices
            assert whole.finish_reason == streamed.finish_reason == "tool_calls"
            assert whole.message.content is streamed.message.content is None
            (call,), (again,) = whole.message.tool_calls, streamed.message.tool_calls
            assert json.loads(call.function.arguments)["city"] in CITY["enum"]
            assert again.function.arguments == call.function.arguments

            result = {"role": "tool", "tool_call_id": call.id, "content": "It is dry."}
            messages = [QUESTION, whole.message.model_dump(exclude_unset=True), result]
            body = {"messages": messages, "tools": ASKED["tools"]}
            rendered = (await http.post("/chat/completions/render", json=body)).json()
            assert call.function.arguments.replace(" ", "") in rendered["prompt"].replace(" ", "")
            answer = await chats.create(**{**ASKED, "messages": messages, "max_tokens": 8})
            assert answer.usage.prompt_tokens == rendered["count"]
            assert transport.submits[-1].prompt_ids.tolist() == rendered["token_ids"]

    asyncio.run(asyncio.wait_for(main(), 120))
