"""openai-python: completions, chats and responses, whole and streamed, with structured output and tools."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from typing import Literal

import openai
from checks import Count, Target, run
from pydantic import BaseModel, Field

QUESTION = [{"role": "user", "content": "Name three colours."}]
STREAMS = 50


class City(BaseModel):
    country: Literal["France", "Japan", "Peru"]
    districts: int = Field(ge=1, le=99)


TOOLS = [
    {"type": "function", "function": {"name": "City", "parameters": City.model_json_schema()}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}},
]


def _client(target: Target) -> openai.OpenAI:
    return openai.OpenAI(base_url=target.api, api_key="none", max_retries=0)


def _chat(target: Target, **options):
    options = {"model": target.model, "messages": QUESTION, "max_tokens": 16, **options}
    return _client(target).chat.completions.create(**options)


def _completion(target: Target, **options):
    options = {"model": target.model, "prompt": "One, two,", "max_tokens": 8, **options}
    return _client(target).completions.create(**options)


def models(target: Target) -> None:
    assert [model.id for model in _client(target).models.list()] == [target.model]


def chat(target: Target) -> None:
    answer = _chat(target, temperature=0)
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 16


def chat_stream(target: Target) -> None:
    """Streamed with a seed, the same text as whole; usage at the end."""
    whole = _chat(target, seed=7)
    *chunks, last = _chat(target, seed=7, stream=True, stream_options={"include_usage": True})
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens


def completions(target: Target) -> None:
    answer = _completion(target, temperature=0)
    stream = _completion(target, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == answer.choices[0].text
    assert answer.usage.completion_tokens == 8


def choices(target: Target) -> None:
    answer = _chat(target, n=3, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1


def chat_logprobs(target: Target) -> None:
    content = (
        _chat(target, logprobs=True, top_logprobs=3, temperature=0).choices[0].logprobs.content
    )
    assert len(content) == 16
    for token in content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == max(top.logprob for top in token.top_logprobs)


def echo_logprobs(target: Target) -> None:
    answer = _completion(target, echo=True, logprobs=2, max_tokens=0)
    scores = answer.choices[0].logprobs
    assert answer.choices[0].text == "One, two,"
    assert scores.token_logprobs[0] is None and all(x < 0 for x in scores.token_logprobs[1:])
    assert "".join(scores.tokens) == "One, two,"


def list_of_prompts(target: Target) -> None:
    prompts = ["One, two,", "The capital of France is", "Red, green,"]
    together = _completion(target, prompt=prompts, temperature=0)
    alone = [
        _completion(target, prompt=prompt, temperature=0).choices[0].text for prompt in prompts
    ]
    assert [choice.text for choice in together.choices] == alone
    assert together.usage.completion_tokens == 8 * len(prompts)


def stop_string(target: Target) -> None:
    whole = _completion(target, temperature=0, max_tokens=16).choices[0].text
    stop = whole.split()[2]
    answer = _completion(target, temperature=0, max_tokens=16, stop=[stop])
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def parse(target: Target) -> None:
    """Structured output: `chat.completions.parse` with a pydantic model."""
    answer = _client(target).chat.completions.parse(
        model=target.model, messages=QUESTION, response_format=City, max_tokens=64
    )
    assert isinstance(answer.choices[0].message.parsed, City)


def json_object(target: Target) -> None:
    """An object, or the beginning of one where the model came to its limit."""
    answer = _chat(target, response_format={"type": "json_object"}, max_tokens=200, temperature=0)
    text = answer.choices[0].message.content
    assert text.lstrip().startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


def stream_helper(target: Target) -> None:
    """Its events, and at the end the parsed object."""
    with _client(target).chat.completions.stream(
        model=target.model, messages=QUESTION, response_format=City, max_tokens=64
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        message = stream.get_final_completion().choices[0].message
    assert "".join(deltas) == message.content
    assert isinstance(message.parsed, City)


def refusal(target: Target) -> None:
    """A wrong value is the client's BadRequestError, and its message names the field."""
    try:
        _chat(target, temperature=-1)
    except openai.BadRequestError as error:
        assert "temperature" in str(error)
    else:
        raise AssertionError("a temperature of -1 was accepted")


def parallel_streams(target: Target) -> Count:
    async def one(client: openai.AsyncOpenAI) -> int:
        stream = await client.chat.completions.create(
            model=target.model,
            messages=QUESTION,
            max_completion_tokens=16,
            stream=True,
            stream_options={"include_usage": True},
        )
        usage = [chunk.usage async for chunk in stream if chunk.usage]
        return usage[-1].completion_tokens

    async def together() -> list[int | BaseException]:
        async with openai.AsyncOpenAI(base_url=target.api, api_key="none", max_retries=0) as client:
            tasks = [one(client) for _ in range(STREAMS)]
            return await asyncio.gather(*tasks, return_exceptions=True)

    lens = asyncio.run(together())
    return Count(sum(isinstance(n, int) and 1 <= n <= 16 for n in lens), STREAMS, "streams")


def tools(target: Target) -> None:
    """A call, its result, and the answer to it."""
    served = target.with_tools()
    asked = {"tools": TOOLS, "max_tokens": 100, "seed": 3}
    choice = _chat(served, tool_choice="required", parallel_tool_calls=False, **asked).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.function.name in ("City", "now")
    result = {"role": "tool", "tool_call_id": call.id, "content": "Fog, 17 degrees."}
    messages = [*QUESTION, choice.message, result]
    answer = _chat(served, messages=messages, tool_choice="none", **asked)
    assert answer.choices[0].message.content and not answer.choices[0].message.tool_calls


def tools_named(target: Target) -> None:
    """The function that is named is called once, and its arguments follow the schema."""
    named = {"type": "function", "function": {"name": "City"}}
    answer = _chat(target.with_tools(), tools=TOOLS, tool_choice=named, max_tokens=100)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "City"
    City.model_validate_json(call.function.arguments)


def tools_streamed(target: Target) -> None:
    """The stream's helper puts the same calls together, with their parsed arguments."""
    served = target.with_tools()
    asked = {
        "model": served.model,
        "messages": QUESTION,
        "tools": [openai.pydantic_function_tool(City)],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 100,
        "seed": 3,
    }
    (whole,) = _client(served).chat.completions.create(**asked).choices
    with _client(served).chat.completions.stream(**asked) as stream:
        deltas = [
            event.arguments_delta
            for event in stream
            if event.type == "tool_calls.function.arguments.delta"
        ]
        (streamed,) = stream.get_final_completion().choices
    (call,), (again,) = whole.message.tool_calls, streamed.message.tool_calls
    assert call.function.arguments == again.function.arguments == "".join(deltas)
    assert streamed.finish_reason == whole.finish_reason == "tool_calls"
    assert isinstance(again.function.parsed_arguments, City)


def tools_parsed(target: Target) -> None:
    """`chat.completions.parse` with a pydantic model as a tool."""
    served = target.with_tools()
    answer = _client(served).chat.completions.parse(
        model=served.model,
        messages=QUESTION,
        tools=[openai.pydantic_function_tool(City)],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=100,
    )
    calls = answer.choices[0].message.tool_calls
    assert all(isinstance(call.function.parsed_arguments, City) for call in calls)


def tools_without_a_format(target: Target) -> None:
    """A model without a format for tools refuses them and says why."""
    try:
        _chat(target, tools=TOOLS)
    except openai.BadRequestError as error:
        assert error.param == "tools" and "calls tools" in str(error)
    else:
        raise AssertionError("tools were accepted")


def responses(target: Target) -> None:
    """Whole, streamed and by the helper, the same text; usage at the end."""
    asked = {
        "model": target.model,
        "input": "Name three colours.",
        "max_output_tokens": 16,
        "temperature": 0,
    }
    whole = _client(target).responses.create(**asked)
    assert whole.output_text and whole.status == "incomplete"
    assert whole.usage.output_tokens == 16
    events = list(_client(target).responses.create(**asked, stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text == events[-1].response.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.usage.output_tokens == 16


def responses_parse(target: Target) -> None:
    """`responses.parse` and the helper for streams with a pydantic model."""
    asked = {"model": target.model, "input": "Name a city.", "max_output_tokens": 64}
    answer = _client(target).responses.parse(**asked, text_format=City)
    assert isinstance(answer.output_parsed, City)
    with _client(target).responses.stream(**asked, text_format=City) as stream:
        assert isinstance(stream.get_final_response().output_parsed, City)


def responses_turns(target: Target) -> None:
    """An answer's output is sent back as input; state on the server is refused by name."""
    asked = {"model": target.model, "max_output_tokens": 8}
    conversation = [{"role": "user", "content": "Hello"}]
    conversation += _client(target).responses.create(**asked, input=conversation).output
    conversation.append({"role": "user", "content": "And?"})
    assert _client(target).responses.create(**asked, input=conversation).output_text
    try:
        _client(target).responses.create(**asked, input="x", previous_response_id="resp_1")
    except openai.BadRequestError as error:
        assert "previous_response_id" in str(error)
    else:
        raise AssertionError("previous_response_id was accepted")


def responses_tools(target: Target) -> None:
    """A call whole and streamed, its result, and the answer to it."""
    served = target.with_tools()
    asked = {
        "model": served.model,
        "tools": [{"type": "function", "strict": True, **TOOLS[0]["function"]}],
        "max_output_tokens": 100,
        "temperature": 0,
    }
    chosen = {"tool_choice": "required", "parallel_tool_calls": False}
    turns = [{"role": "user", "content": "A city?"}]
    whole = _client(served).responses.create(**asked, **chosen, input=turns)
    (call,) = (item for item in whole.output if item.type == "function_call")
    City.model_validate_json(call.arguments)
    events = list(_client(served).responses.create(**asked, **chosen, input=turns, stream=True))
    (done,) = (one for one in events if one.type == "response.function_call_arguments.done")
    assert done.arguments == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "It is far."}
    turns += [*whole.output, result]
    answer = _client(served).responses.create(**asked, input=turns, tool_choice="none")
    assert answer.output_text


def responses_tools_parsed(target: Target) -> None:
    """`responses.parse` with a pydantic model as a tool."""
    served = target.with_tools()
    answer = _client(served).responses.parse(
        model=served.model,
        input="A city?",
        tools=[openai.pydantic_function_tool(City)],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=100,
    )
    calls = [item for item in answer.output if item.type == "function_call"]
    assert calls and all(isinstance(call.parsed_arguments, City) for call in calls)


def decisions(target: Target) -> None:
    """Every kind of question; asked again, the probabilities have the same bits and the input is cached."""
    asked = {
        "model": target.model,
        "input": "I was charged twice for the same month. " * 8,
        "questions": [
            {"type": "predicate", "instructions": "The writer has paid."},
            {
                "type": "choice",
                "name": "topic",
                "instructions": "What is it about?",
                "choices": [{"value": "billing"}, {"value": "the weather"}, {"value": False}],
            },
            {
                "type": "score",
                "instructions": "How urgent is it?",
                "levels": [{"label": "can wait"}, {"label": "today"}],
            },
        ],
    }
    first = _client(target).decisions.create(**asked)
    predicate, choice, score = first.answers
    assert 0 < predicate.probability < 1
    assert choice.name == "topic" and choice.choice in ("billing", "the weather", False)
    assert abs(sum(entry.probability for entry in choice.probabilities) - 1) < 1e-9
    assert 0 <= score.score <= 1
    again = _client(target).decisions.create(**asked)
    assert again.answers == first.answers
    assert again.usage.input_tokens_details.cached_tokens > 64


def embeddings(target: Target) -> None:
    """In both encodings, and by default, which is base64 that the client decodes."""
    inputs = ["A lighthouse at night.", "Bread and rain."]
    create = _client(target).embeddings.create
    plain = create(model=target.model, input=inputs, encoding_format="float")
    coded = create(model=target.model, input=inputs, encoding_format="base64")
    decoded = create(model=target.model, input=inputs)
    for number, text, vector in zip(plain.data, coded.data, decoded.data, strict=True):
        data = base64.b64decode(text.embedding)
        values = struct.unpack(f"<{len(data) // 4}f", data)
        assert list(values) == [_as_float32(value) for value in number.embedding]
        assert [_as_float32(value) for value in vector.embedding] == list(values)
        assert abs(sum(value * value for value in values) - 1) < 1e-5
    assert plain.usage.prompt_tokens == plain.usage.total_tokens > 0
    alone = create(model=target.model, input=inputs[1], encoding_format="float", dimensions=8)
    assert len(alone.data[0].embedding) == 8


def _as_float32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


run(
    [
        models,
        chat,
        chat_stream,
        completions,
        choices,
        chat_logprobs,
        echo_logprobs,
        list_of_prompts,
        stop_string,
        parse,
        json_object,
        stream_helper,
        refusal,
        parallel_streams,
        responses,
        responses_parse,
        responses_turns,
        decisions,
        embeddings,
        tools,
        tools_named,
        tools_streamed,
        tools_parsed,
        tools_without_a_format,
        responses_tools,
        responses_tools_parsed,
    ]
)
