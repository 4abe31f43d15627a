"""What the scripts of agents share: a turn of an agent in a folder of its own, and what must hold of it.

```
 first request    the agent's tools, one narrowed             ─▶  a call, which the engine's grammar makes
 the agent        runs it: it reads the only file
 second request   the same with the call and its result       ─▶  a text
```
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from checks import Count, Target
from tap import Record

FILE = "notes.txt"
NOTES = "The lighthouse is green."
QUESTION = f"What is in {FILE}?"
_TIMEOUT_S = 300
_ANSWERS = 2
# The agent sees nothing of this machine's configuration, and no key.
_INHERITED = ("PATH", "LANG")
_SWITCHED_OFF = {"DO_NOT_TRACK": "1", "DISABLE_TELEMETRY": "1", "TERM": "dumb"}


@dataclass(frozen=True, slots=True)
class Turn:
    """What an agent printed in a turn, and what passed the tap."""

    events: list[dict[str, Any]]  # one for each line of its output
    record: Record

    def checked(self, path: str) -> Count:
        """The answers to requests with tools; the details have the shapes and sizes of all requests.

        An agent may repeat a request in a simpler form after a refusal.
        """
        exchanges = self.record.exchanges
        with_tools = [one for one in exchanges if one.path == path and "tools" in one.sent]
        num_served = sum(one.status == 200 for one in with_tools)
        assert {one.status for one in exchanges} <= {200, 400}
        details = {
            "exchanges": [asdict(one) for one in exchanges],
            "refused_elsewhere": dict(self.record.elsewhere),
        }
        return Count(num_served, _ANSWERS, "answers", details)


def file(target: Target) -> Path:
    """The only file in the agent's folder."""
    return target.work / "project" / FILE


def find_tool(body: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """The tool of this name in a request; None if it has none."""
    return next((tool for tool in body.get("tools", ()) if tool.get("name") == name), None)


def only(**values: str) -> dict[str, Any]:
    """A JSON schema that one object follows."""
    return {
        "type": "object",
        "properties": {name: {"enum": [value]} for name, value in values.items()},
        "required": list(values),
        "additionalProperties": False,
    }


def run_agent(
    command: Sequence[str], target: Target, record: Record, variables: Mapping[str, str]
) -> Turn:
    """Run an agent that prints a JSON object a line, with the tap as its only way out.

    Raises
    ------
    RuntimeError
        The agent failed; the message has the end of its output.
    """
    home = target.work / "home"
    home.mkdir(exist_ok=True)
    file(target).parent.mkdir()
    file(target).write_text(f"{NOTES}\n")
    inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    done = subprocess.run(
        command,
        env={**inherited, **_SWITCHED_OFF, "HOME": str(home), **record.environment(), **variables},
        cwd=file(target).parent,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-400:])
    return Turn([json.loads(line) for line in done.stdout.splitlines()], record)
