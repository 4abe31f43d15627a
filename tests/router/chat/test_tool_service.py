"""Tool calls through the whole router, over a real engine: constrained, cut, migrated and resumed."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from engine_transport import EngineTransport, make_service
from family_templates import PLAIN, THINKING

from quire.protos.errors import InvalidRequest, UnsupportedField
from quire.protos.sampling_params import Grammar
from quire.router.request import resume
from quire.router.text.chat_template import ChatTemplate
from quire.router.tool_types import Tool, ToolCall, ToolChoice
from quire.router.types import GenerationRequest, GenerationStream, OutputDelta

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rom", "Zürich"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = (Tool("weather", None, SCHEMA),)
REQUIRED = ToolChoice("required")
CHAT = GenerationRequest(
    request_id="test",
    messages=({"role": "user", "content": "Hi"},),
    tools=TOOLS,
    tool_choice=REQUIRED,
    max_tokens=120,
    seed=5,
)


@pytest.fixture(scope="module")
def transport() -> EngineTransport:
    transport = EngineTransport()
    yield transport
    transport.engine.close()


class Whole:
    """A whole answer of one choice."""

    def __init__(self, deltas: list[OutputDelta]):
        self.text = "".join(delta.text for delta in deltas)
        self.reasoning = "".join(delta.reasoning for delta in deltas)
        self.calls: tuple[ToolCall, ...] = sum((delta.tool_calls for delta in deltas), ())
        self.token_ids = [i for delta in deltas for i in delta.token_ids]
        self.finish_reason = deltas[-1].finish_reason
        self.parts = [(call.index, call.name, call.arguments) for call in self.calls]


def ask(
    runner, transport, request: GenerationRequest = CHAT, **options: Any
) -> tuple[GenerationStream, list[OutputDelta]]:
    async def run() -> tuple[GenerationStream, list[OutputDelta]]:
        stream = await make_service(transport, **options).generate(request)
        return stream, [delta async for delta in stream]

    return runner.run(run())


def test_a_required_call_is_valid(runner, transport):
    _, deltas = ask(runner, transport, replace(CHAT, parallel_tool_calls=False))
    whole = Whole(deltas)
    (call,) = whole.calls
    assert whole.finish_reason == "tool_calls" and not whole.text
    assert call.name == "weather" and call.index == 0 and len(call.call_id) == 9
    jsonschema.validate(json.loads(call.arguments), SCHEMA)


def test_as_many_large_tools_as_are_served_may_be_required(runner, transport):
    template = ChatTemplate("{% for tool in tools or [] %}.{% endfor %}{# <tool_call> #}")
    option = {"enum": [f"choice {i}" for i in range(150)]}
    tools = [Tool("weather", None, SCHEMA)]
    for i in range(1, 128):
        tools.append(Tool(f"tool_{i}", None, {"type": "object", "properties": {"option": option}}))
    request = replace(CHAT, tools=tuple(tools), parallel_tool_calls=False)
    (call,) = Whole(ask(runner, transport, request, template=template)[1]).calls
    schemas = {tool.name: tool.parameters for tool in tools}
    jsonschema.validate(json.loads(call.arguments), schemas[call.name])


@pytest.mark.parametrize("num_tokens", [1, 4, 11, 25])
def test_a_migrated_stream_has_the_same_calls(runner, transport, num_tokens: int):
    request = replace(CHAT, parallel_tool_calls=False)
    uncut = Whole(ask(runner, transport, request)[1])
    transport.lose_after = [num_tokens]
    stream, deltas = ask(runner, transport, request)
    assert stream.explain.attempts == 2
    assert Whole(deltas).parts == uncut.parts and Whole(deltas).token_ids == uncut.token_ids


def test_a_resumed_stream_continues_after_any_event(runner, transport):
    request = replace(CHAT, parallel_tool_calls=False)
    stream, deltas = ask(runner, transport, request)
    ids = resume.EventIds(stream.origin, request.marks)
    for i, event_id in enumerate(map(ids.after, deltas)):
        if i % 8 and i + 1 < len(deltas):
            continue
        point = resume.parse(event_id, "resume_from")
        _, rest = ask(runner, transport, replace(request, resume_from=point))
        if i + 1 == len(deltas):
            assert rest == []
            continue
        # Calls have the ids that they had.
        assert Whole(rest).calls == Whole(deltas[i + 1 :]).calls
        assert Whole(rest).token_ids == Whole(deltas[i + 1 :]).token_ids
        assert Whole(rest).finish_reason == "tool_calls"
    other = replace(request, parallel_tool_calls=True, resume_from=point)
    with pytest.raises(InvalidRequest):
        ask(runner, transport, other)


def test_a_call_that_is_cut_is_text(runner, transport):
    whole = Whole(ask(runner, transport, replace(CHAT, max_tokens=8))[1])
    assert whole.finish_reason == "length" and not whole.calls
    assert whole.text.startswith("<tool_call>")


def test_choices_have_different_ids(runner, transport):
    _, deltas = ask(runner, transport, replace(CHAT, n=2, parallel_tool_calls=False))
    calls = [call for delta in deltas for call in delta.tool_calls]
    assert len(calls) == len({call.call_id for call in calls}) == 2


# A call as the model would write it, forced by a grammar of the client.
CALLS = "".join(
    f'<tool_call>{{"name": "weather", "arguments": {{"days": {days}}}}}</tool_call>\n'
    for days in (1, 2)
)
FORCED = Grammar("choice", json.dumps([CALLS]), "structured_outputs.choice")


def test_without_a_choice_of_tools_a_call_is_text(runner, transport):
    request = replace(CHAT, tool_choice=ToolChoice("none"), grammar=FORCED, max_tokens=None)
    whole = Whole(ask(runner, transport, request)[1])
    assert whole.text == CALLS and not whole.calls and whole.finish_reason == "stop"


def test_stop_strings_apply_to_the_text_only(runner, transport):
    request = replace(CHAT, stop=("weather",), parallel_tool_calls=False)
    assert len(Whole(ask(runner, transport, request)[1]).calls) == 1


def test_reasoning_is_separate_and_counted(runner, transport):
    """The prompt opens the reasoning, and this model never closes it."""
    template = ChatTemplate(THINKING)
    request = replace(CHAT, tools=(), tool_choice=None, max_tokens=12, n=2, ignore_eos=True)
    stream, deltas = ask(runner, transport, request, template=template)
    assert all(delta.text == "" for delta in deltas)
    assert "".join(delta.reasoning for delta in deltas)
    assert stream.usage.reasoning_tokens == stream.usage.completion_tokens == 24


def test_tools_that_the_model_cannot_call_are_refused(runner, transport):
    for source, reason in ((PLAIN, "format"), (PLAIN + "{# <tool_call> #}", "ignores tools")):
        with pytest.raises(UnsupportedField, match=reason) as caught:
            ask(runner, transport, template=ChatTemplate(source))
        assert caught.value.field == "tools"
        request = replace(CHAT, tools=(), tool_choice=None, max_tokens=3)
        assert ask(runner, transport, request, template=ChatTemplate(source))[1]


def test_a_grammar_excludes_min_tokens(runner, transport):
    with pytest.raises(InvalidRequest) as caught:
        ask(runner, transport, replace(CHAT, min_tokens=5))
    assert caught.value.field == "min_tokens"
