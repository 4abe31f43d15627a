"""Claude Code: one turn with a tool call over the Messages API."""

from __future__ import annotations

from functools import cache
from typing import Any

from agents import NOTES, QUESTION, Turn, file, find_tool, only, run_agent
from checks import Count, Target, run
from tap import tap

PATH = "/v1/messages"
SWITCHED_OFF = {
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_AUTOUPDATER": "1",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
}


@cache
def _turn(target: Target) -> Turn:
    target = target.with_tools()

    def narrow(body: dict[str, Any]) -> None:
        """`Read` reads one file. The first turn has to call it."""
        read = find_tool(body, "Read")
        if read is None:
            return
        read["input_schema"] = only(file_path=str(file(target)))
        contents = (message["content"] for message in body["messages"])
        blocks = (block for content in contents if isinstance(content, list) for block in content)
        if not any(block["type"] == "tool_result" for block in blocks):
            choice = {"type": "tool", "name": "Read", "disable_parallel_tool_use": True}
            body["tool_choice"] = choice

    with tap(target.url, narrow) as record:
        variables = {
            "ANTHROPIC_BASE_URL": record.url,
            "ANTHROPIC_AUTH_TOKEN": "none",
            "ANTHROPIC_MODEL": target.model,
            "ANTHROPIC_SMALL_FAST_MODEL": target.model,
            **SWITCHED_OFF,
        }
        command = ["claude", "--print", QUESTION, "--output-format", "stream-json", "--verbose"]
        return run_agent([*command, "--allowedTools", "Read"], target, record, variables)


def _blocks(target: Target, kind: str) -> list[dict[str, Any]]:
    messages = (one["message"] for one in _turn(target).events if "message" in one)
    return [block for one in messages for block in one["content"] if block["type"] == kind]


def turn(target: Target) -> Count:
    """Claude Code runs the tool that the model calls, and shows the model's answer to its result."""
    (call,) = _blocks(target, "tool_use")
    assert call["name"] == "Read"
    (result,) = _blocks(target, "tool_result")
    assert NOTES in result["content"]
    last = _turn(target).events[-1]
    assert last["type"] == "result" and not last["is_error"] and last["result"]
    return _turn(target).checked(PATH)


def prefix(target: Target) -> None:
    """The second request finds the first one's prompt in the cache, though its first system block is another."""
    usage = _turn(target).events[-1]["usage"]
    cached = usage["cache_read_input_tokens"]
    assert cached > 0.45 * (usage["input_tokens"] + cached), usage


run([turn, prefix])
