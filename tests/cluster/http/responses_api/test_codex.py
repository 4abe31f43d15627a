"""What Codex sends: its shape and its size, without its prompts."""

from __future__ import annotations

from responses_reader import events_of, response_of

from quire.router.tool_types import ToolCall
from quire.router.types import OutputDelta


def codex_request() -> dict:
    """The shape and the size of what Codex 0.171.0 sends in the third request of a turn; the texts are made up."""
    text = "word " * 3400
    tool = {
        "type": "function",
        "name": "exec_command",
        "description": "Runs a command.",
        "strict": False,
        "parameters": {
            "type": "object",
            "properties": {"cmd": {"type": "string"}, "yield_time_ms": {"type": "number"}},
            "required": ["cmd"],
            "additionalProperties": False,
        },
    }
    agents = [{**tool, "name": name} for name in ("spawn_agent", "wait_agent")]
    group = {"type": "namespace", "name": "agents", "description": "Agents.", "tools": agents}

    def message(number: int, role: str, *texts: str) -> dict:
        parts = [{"type": "input_text", "text": part} for part in texts]
        return {"type": "message", "id": f"msg_{number}", "role": role, "content": parts}

    def call(number: int, **fields: str) -> list[dict]:
        given = {"type": "function_call", "status": "completed", "id": f"fc_{number}", **fields}
        output = {"type": "function_call_output", "id": f"fco_{number}", "output": "done"}
        called = {"arguments": "{}", "call_id": f"call_{number}"}
        return [{**given, **called}, {**output, "call_id": f"call_{number}"}]

    reasoning = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "look first"}],
        "encrypted_content": None,
    }
    return {
        "model": "acme/tiny",
        "stream": True,
        "input": [
            message(1, "developer", text),
            message(2, "developer", text[:2000], text[:300]),
            message(3, "user", text[:400]),
            message(4, "user", "Make a file"),
            reasoning,
            *call(1, name="exec_command"),
            *call(2, name="wait_agent", namespace="agents"),
        ],
        "tools": [tool, group, {"type": "web_search", "external_web_access": False}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "01a21ae2-0d81-7c33-95de-4f9720766928",
        "client_metadata": {"turn_id": "01a21ae2", "thread_id": "01a21ae2"},
    }


def test_a_turn_of_codex(http, service) -> None:
    call = ToolCall(0, "call_3", "agents__spawn_agent", '{"cmd":"ls"}')
    service.script = [OutputDelta("", [1], "tool_calls", tool_calls=(call,))]
    response = http.post("/v1/responses", json=codex_request())
    assert response.status_code == 200, response.text
    (item,) = response_of(events_of(response.text))["output"]
    assert (item["namespace"], item["name"]) == ("agents", "spawn_agent")
    asked = service.requests[-1]
    assert [message["role"] for message in asked.messages] == [
        "system", "user", "user", "assistant", "tool", "assistant", "tool",
    ]  # fmt: skip
    assert asked.messages[3]["reasoning_content"] == "look first"
    assert [tool.name for tool in asked.tools] == [
        "exec_command",
        "agents__spawn_agent",
        "agents__wait_agent",
    ]
    assert asked.session == "01a21ae2-0d81-7c33-95de-4f9720766928"
