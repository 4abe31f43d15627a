"""Codex: one turn with a tool call over the Responses API."""

from __future__ import annotations

from functools import cache
from typing import Any

from agents import FILE, NOTES, QUESTION, Turn, find_tool, only, run_agent
from checks import Count, Target, run
from tap import tap

PATH = "/v1/responses"
COMMAND = f"cat {FILE}"
CONFIG = """
model = "{model}"
model_provider = "quire"
check_for_update_on_startup = false
[model_providers.quire]
name = "Quire"
base_url = "{url}/v1"
wire_api = "responses"
[analytics]
enabled = false
[otel]
exporter = "none"
metrics_exporter = "none"
"""


def _narrow(body: dict[str, Any]) -> None:
    """The shell runs `COMMAND` only. The first turn has to run it."""
    shell = find_tool(body, "exec_command")
    if shell is None:
        return
    shell["parameters"] = only(cmd=COMMAND)
    if not any(item["type"] == "function_call_output" for item in body["input"]):
        body["tool_choice"] = {"type": "function", "name": "exec_command"}


@cache
def _turn(target: Target) -> Turn:
    target = target.with_tools()
    home = target.work / "codex"
    home.mkdir()
    with tap(target.url, _narrow) as record:
        home.joinpath("config.toml").write_text(CONFIG.format(model=target.model, url=record.url))
        command = ["codex", "exec", "--json", "--skip-git-repo-check", "--sandbox", "read-only"]
        return run_agent([*command, QUESTION], target, record, {"CODEX_HOME": str(home)})


def _items(target: Target, kind: str) -> list[dict[str, Any]]:
    events = (one for one in _turn(target).events if one["type"] == "item.completed")
    return [one["item"] for one in events if one["item"]["type"] == kind]


def turn(target: Target) -> Count:
    """Codex runs the command that the model calls, and shows the model's answer to its result."""
    (command,) = _items(target, "command_execution")
    assert COMMAND in command["command"] and command["aggregated_output"].strip() == NOTES
    assert command["exit_code"] == 0
    (message,) = _items(target, "agent_message")
    assert message["text"]
    return _turn(target).checked(PATH)


def prefix(target: Target) -> None:
    """The second request finds the first one's prompt in the cache."""
    usage = _turn(target).events[-1]["usage"]
    assert usage["cached_input_tokens"] > 0.45 * usage["input_tokens"], usage


run([turn, prefix])
