"""grpcurl: services by reflection, and calls of methods that it knows by reflection only."""

from __future__ import annotations

import json
import subprocess

from checks import Target, run

SERVICES = {"quire.v1.Generation", "quire.v1.Control", "grpc.health.v1.Health"}
PROMPT = {"prompt": "One, two,", "sampling": {"max_tokens": 8, "seed": 7}}
CITIES = ("Lima", "Lyon")
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": CITIES}},
    "required": ["city"],
    "additionalProperties": False,
}


def _grpcurl(target: Target, *arguments: str, fields: dict | None = None) -> str:
    """What the command prints."""
    given = [] if fields is None else ["-d", json.dumps(fields)]
    metadata = ["-H", f"application: {target.application}"]
    command = ["grpcurl", "-plaintext", *metadata, *given, target.grpc, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-400:])
    return done.stdout


def _call(target: Target, method: str, **fields) -> list[dict]:
    """The messages of the answer."""
    text = _grpcurl(target, method, fields=fields)
    decoder, messages = json.JSONDecoder(), []
    while text := text.lstrip():
        message, end = decoder.raw_decode(text)
        messages.append(message)
        text = text[end:]
    return messages


def services(target: Target) -> None:
    listed = set(_grpcurl(target, "list").split())
    assert listed >= SERVICES, listed


def describe(target: Target) -> None:
    assert "rpc Generate (" in _grpcurl(target, "describe", "quire.v1.Generation")


def health(target: Target) -> None:
    assert _call(target, "grpc.health.v1.Health/Check") == [{"status": "SERVING"}]


def model_info(target: Target) -> None:
    assert target.model in json.dumps(_call(target, "quire.v1.Control/GetModelInfo"))


def generate(target: Target) -> None:
    """A stream has the text of the whole answer."""
    (whole,) = _call(target, "quire.v1.Generation/GenerateOnce", **PROMPT)
    messages = _call(target, "quire.v1.Generation/Generate", **PROMPT)
    assert whole["text"] and "".join(one.get("text", "") for one in messages) == whole["text"]


def tokens(target: Target) -> None:
    """The tokens of a text are the text again."""
    (found,) = _call(target, "quire.v1.Generation/Tokenize", prompt=PROMPT["prompt"])
    token_ids = found["token_ids"]
    (text,) = _call(target, "quire.v1.Generation/Detokenize", token_ids=token_ids)
    assert text == {"text": PROMPT["prompt"]}


def tools(target: Target) -> None:
    """A call that is asked for, whole and streamed."""
    chat = {
        "messages": [{"role": "user", "content": "How is the weather in Lima?"}],
        "tools": [{"name": "weather", "parameters": json.dumps(WEATHER), "strict": True}],
        "tool_choice": {"mode": "TOOL_CHOICE_MODE_REQUIRED"},
        "parallel_tool_calls": False,
    }
    asked = {"messages": chat, "sampling": {"max_tokens": 100, "seed": 3}}
    served = target.with_tools()
    (whole,) = _call(served, "quire.v1.Generation/GenerateOnce", **asked)
    (call,) = whole["tool_calls"]
    assert call["name"] == "weather" and json.loads(call["arguments"])["city"] in CITIES
    messages = _call(served, "quire.v1.Generation/Generate", **asked)
    (again,) = (one for message in messages for one in message.get("tool_calls", ()))
    assert again["arguments"] == call["arguments"]


def error(target: Target) -> None:
    """A refusal has its status and names the field."""
    try:
        _call(target, "quire.v1.Generation/GenerateOnce", prompt="x", sampling={"temperature": -1})
    except RuntimeError as refusal:
        assert "InvalidArgument" in str(refusal) and "temperature" in str(refusal)
    else:
        raise AssertionError("a temperature of -1 was accepted")


run([services, describe, health, model_info, generate, tokens, tools, error])
