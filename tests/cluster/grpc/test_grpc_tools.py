"""Tools, calls, reasoning and tokens over gRPC."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from live_grpc import MODES, Clients, failure, request, run

from quire.protos import generation_pb2
from quire.router.tool_types import Tool, ToolCall, ToolChoice
from quire.router.types import OutputDelta

USER = generation_pb2.ChatMessage(role="user", content="What is the weather in Oslo?")
WEATHER = generation_pb2.Tool(
    name="weather",
    description="The weather.",
    parameters='{"type": "object", "properties": {"city": {"type": "string"}}}',
    strict=True,
)
NOW = generation_pb2.Tool(name="now")
OSLO = ToolCall(0, "call_a", "weather", '{"city": "Oslo ☀"}')
BERGEN = ToolCall(1, "call_b", "weather", '{"city": "Bergen"}')
SCRIPT = [
    OutputDelta("", [1], reasoning="Two "),
    OutputDelta("", [2], reasoning="cities."),
    OutputDelta("I look.", [3], tool_calls=(OSLO,)),
    OutputDelta("", [4, 5], "tool_calls", tool_calls=(BERGEN,)),
]
MODE = generation_pb2.ToolChoiceMode


def chat(*turns: generation_pb2.ChatMessage, **fields: Any) -> generation_pb2.GenerateRequest:
    """A request with these turns and these fields of `ChatMessages`."""
    return request(messages=generation_pb2.ChatMessages(messages=turns or [USER], **fields))


def named(calls: Any) -> list[tuple[str, str, str]]:
    return [(call.id, call.name, call.arguments) for call in calls]


@pytest.mark.parametrize("mode", MODES)
def test_calls_and_reasoning_are_the_same_streamed_and_whole(service, mode: str) -> None:
    service.script, service.reasoning_tokens = SCRIPT, 2
    asked = chat(tools=[WEATHER])
    asked.n = 2

    async def body(clients: Clients) -> None:
        whole = await clients.generation.GenerateOnce(asked)
        responses = [response async for response in clients.generation.Generate(asked)]
        expected = [(c.call_id, c.name, c.arguments) for c in (OSLO, BERGEN)]
        for i, choice in enumerate((whole, *whole.more_choices)):
            assert (choice.text, choice.reasoning) == ("I look.", "Two cities.")
            assert named(choice.tool_calls) == expected
            assert choice.finish_reason == generation_pb2.FINISH_REASON_TOOL_CALLS
            mine = [response for response in responses if response.choice == i]
            assert "".join(r.reasoning for r in mine) == choice.reasoning
            assert "".join(r.text for r in mine) == choice.text
            assert [call for r in mine for call in r.tool_calls] == list(choice.tool_calls)
            assert mine[-1].finish_reason == choice.finish_reason
        assert whole.usage == responses[-1].usage
        assert whole.usage.reasoning_tokens == 2

    run(service, mode, body)


def test_tools_reach_the_router(service) -> None:
    names = generation_pb2.ToolChoice(mode=MODE.TOOL_CHOICE_MODE_REQUIRED, names=["now"])

    async def body(clients: Clients) -> None:
        for asked in (
            chat(
                tools=[WEATHER, NOW],
                tool_choice=names,
                parallel_tool_calls=False,
                reasoning_effort="low",
            ),
            chat(),
        ):
            await clients.generation.GenerateOnce(asked)

    run(service, "direct", body)
    full, bare = service.requests
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    assert full.tools == (Tool("weather", "The weather.", schema, True), Tool("now"))
    assert full.tool_choice == ToolChoice("required", ("now",))
    assert (full.parallel_tool_calls, full.reasoning_effort) == (False, "low")
    assert (bare.tools, bare.tool_choice) == ((), None)
    assert (bare.parallel_tool_calls, bare.reasoning_effort) == (True, None)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (MODE.TOOL_CHOICE_MODE_UNSPECIFIED, "auto"),
        (MODE.TOOL_CHOICE_MODE_AUTO, "auto"),
        (MODE.TOOL_CHOICE_MODE_NONE, "none"),
        (MODE.TOOL_CHOICE_MODE_REQUIRED, "required"),
        (77, "auto"),  # a value of a newer client
    ],
)
def test_every_mode_of_tool_choice_reaches_the_router(service, mode: int, expected: str) -> None:
    asked = chat(tools=[NOW], tool_choice=generation_pb2.ToolChoice(mode=mode))

    async def body(clients: Clients) -> None:
        await clients.generation.GenerateOnce(asked)

    run(service, "direct", body)
    assert service.requests[0].tool_choice == ToolChoice(expected)


def test_a_conversation_with_calls_reaches_the_router(service) -> None:
    turns = (
        USER,
        generation_pb2.ChatMessage(
            role="assistant",
            reasoning="Two cities.",
            tool_calls=[generation_pb2.ToolCall(id="call_a", name="weather", arguments="{}")],
        ),
        generation_pb2.ChatMessage(role="tool", tool_call_id="call_a", content="sun"),
    )

    async def body(clients: Clients) -> None:
        await clients.generation.GenerateOnce(chat(*turns, tools=[WEATHER]))
        turns[1].tool_calls[0].name = ""
        error = await failure(clients.generation.GenerateOnce(chat(*turns)))
        field = "messages[1].tool_calls[0].name"
        assert dict(error.trailing_metadata())["x-quire-error-field"] == field
        assert error.details().startswith(f"{field} must be")

    run(service, "direct", body)
    assert service.requests[0].messages == (
        {"role": "user", "content": USER.content},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Two cities.",
            "tool_calls": [
                {
                    "id": "call_a",
                    "type": "function",
                    "function": {"name": "weather", "arguments": "{}"},
                }
            ],
        },
        {"role": "tool", "content": "sun", "tool_call_id": "call_a"},
    )


def tool(parameters: str) -> generation_pb2.Tool:
    return generation_pb2.Tool(name="f", parameters=parameters)


@pytest.mark.parametrize(
    ("asked", "field", "text"),
    [
        (chat(tools=[NOW, tool("{")]), "tools[1].parameters", "the text of a JSON object"),
        (chat(tools=[tool("[1]")]), "tools[0].parameters", "the text of a JSON object, got list"),
        (chat(tools=[NOW] * 129), "tools", "at most 128 tools, got 129"),
        (chat(tools=[tool("x" * 300_000)] * 2), "tools", "at most 524288 characters"),
        (chat(tools=[tool("[" * 40_000)] * 2), "tools", "at most 65536 values"),
        (
            chat(tools=[NOW], tool_choice=generation_pb2.ToolChoice(names=["now"] * 129)),
            "tool_choice.names",
            "at most 128 names, got 129",
        ),
    ],
)
def test_a_wrong_tool_is_named(service, asked, field: str, text: str) -> None:
    async def body(clients: Clients) -> None:
        for method in (clients.generation.GenerateOnce, clients.generation.Render):
            error = await failure(method(asked))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert error.details().startswith(field) and text in error.details()
            assert dict(error.trailing_metadata())["x-quire-error-field"] == field

    run(service, "direct", body)
    assert service.requests == []


# --------------------------------------------------------------------------------------------------
# Tokens
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_render_shows_the_prompt_of_a_request(service, mode: str) -> None:
    async def body(clients: Clients) -> None:
        rendered = await clients.generation.Render(chat(tools=[WEATHER]))
        assert rendered.text == USER.content
        assert list(rendered.token_ids) == list(USER.content.encode())
        assert (rendered.max_model_len, rendered.model) == (512, "acme/tiny")
        ids = await clients.generation.Render(request(token_ids={"ids": [5, 6]}))
        assert (ids.text, list(ids.token_ids)) == ("", [5, 6])

    run(service, mode, body)
    assert service.requests[0].tools[0].name == "weather" and service.streams == []


@pytest.mark.parametrize("mode", MODES)
def test_texts_become_tokens_and_tokens_texts(service, mode: str) -> None:
    async def body(clients: Clients) -> None:
        tokens = await clients.generation.Tokenize(
            generation_pb2.TokenizeRequest(prompt="ab", return_token_strs=True)
        )
        assert list(tokens.token_ids) == [97, 98] and list(tokens.token_strs) == ["<97>", "<98>"]
        assert tokens.max_model_len == 512
        of_chat = await clients.generation.Tokenize(
            generation_pb2.TokenizeRequest(
                model="acme/tiny",
                messages=generation_pb2.ChatMessages(messages=[USER]),
                add_special_tokens=False,
            )
        )
        assert len(of_chat.token_ids) == len(USER.content) and not of_chat.token_strs
        text = await clients.generation.Detokenize(
            generation_pb2.DetokenizeRequest(token_ids=[5, 97])
        )
        assert text.text == "word5 naïve "

    run(service, mode, body)
    bare, of_chat = service.requests
    assert (bare.prompt, bare.add_special_tokens) == ("ab", None)
    assert (of_chat.messages[0]["role"], of_chat.add_special_tokens) == ("user", False)
    assert service.streams == [] and service.refused_by_front_end == []


@pytest.mark.parametrize(
    ("method", "asked", "code", "field"),
    [
        ("Render", {}, grpc.StatusCode.INVALID_ARGUMENT, "input"),
        ("Tokenize", {}, grpc.StatusCode.INVALID_ARGUMENT, "input"),
        ("Detokenize", {"model": "x"}, grpc.StatusCode.NOT_FOUND, "model"),
        ("Detokenize", {"token_ids": [100]}, grpc.StatusCode.INVALID_ARGUMENT, "token_ids[0]"),
        (
            "Detokenize",
            {"token_ids": range(524_289)},
            grpc.StatusCode.INVALID_ARGUMENT,
            "token_ids",
        ),
    ],
)
def test_what_is_no_text_and_no_tokens_is_refused(service, method, asked, code, field) -> None:
    message = {
        "Render": generation_pb2.GenerateRequest,
        "Tokenize": generation_pb2.TokenizeRequest,
        "Detokenize": generation_pb2.DetokenizeRequest,
    }[method](**asked)

    async def body(clients: Clients) -> None:
        error = await failure(getattr(clients.generation, method)(message))
        assert error.code() is code, error.details()
        assert dict(error.trailing_metadata())["x-quire-error-field"] == field

    run(service, "direct", body)


@pytest.mark.parametrize("mode", MODES)
def test_inputs_become_embeddings(service, mode: str) -> None:
    """The service's values are an input's length, half of it and so on."""
    inputs = [{"text": "four"}, {"token_ids": {"ids": [5, 6]}}]

    async def body(clients: Clients) -> None:
        asked = generation_pb2.EmbedRequest(
            inputs=inputs, dimensions=2, request_id="e", cache_salt="salt", priority=4
        )
        call = clients.generation.Embed(asked)
        answer = await call
        assert [list(item.values) for item in answer.embeddings] == [[4, 2], [2, 1]]
        assert (answer.usage.prompt_tokens, answer.usage.cached_tokens) == (6, 3)
        assert (answer.request_id, answer.model) == ("e", "acme/tiny")
        assert dict(await call.trailing_metadata())["x-quire-replica"] == "replica-a"
        whole = await clients.generation.Embed(generation_pb2.EmbedRequest(inputs=inputs[:1]))
        assert len(whole.embeddings[0].values) == 4

    run(service, mode, body)
    asked = service.requests[0]
    assert asked.prompts == ("four", (5, 6))
    assert (asked.tenant, asked.priority, asked.add_special_tokens) == ("salt", 4, None)


@pytest.mark.parametrize(
    ("inputs", "field", "message"),
    [
        ([], "inputs", "at least 1 input"),
        ([{"text": "a"}, {}], "inputs[1]", "inputs[1] must have a text"),
        ([{"text": ""}], "inputs[0]", "inputs[0] must have a text"),
        ([{"token_ids": {"ids": []}}], "inputs[0]", "inputs[0] must have a text"),
        ([{"text": "a"}] * 2049, "inputs", "inputs must have at most 2048 inputs, got 2049"),
        (
            [{"token_ids": {"ids": range(262_145)}}] * 2,
            *("inputs", "inputs must have at most 524288 token ids in all, got 524290"),
        ),
        ([{"text": "a" * 513}], "inputs[0]", "inputs[0]: 513 tokens; the model takes at most 512"),
    ],
)
def test_inputs_that_cannot_be_embedded_are_refused(service, inputs, field, message) -> None:
    async def body(clients: Clients) -> None:
        asked = generation_pb2.EmbedRequest(inputs=inputs)
        error = await failure(clients.generation.Embed(asked))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error.details()
        assert message in error.details()
        assert dict(error.trailing_metadata())["x-quire-error-field"] == field

    run(service, "direct", body)
