"""What the script of a client shares: where the server is, and how it reports.

The script runs in the client's environment, so this module needs the standard library alone. A check is a function
of the `Target`. It returns nothing where all of it holds, or a `Count`; an exception is a failure, and its text is
kept. One JSON line is printed for each check, as soon as it has ended.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

# Name of the application with tools, of its model, and of the first part of its paths.
TOOLS = "tools"
_MAX_ERROR_CHARS = 500


@dataclass(frozen=True, slots=True)
class Target:
    """An application of a running server."""

    url: str  # http://HOST:PORT, with the application's prefix
    grpc: str  # HOST:PORT
    application: str  # which gRPC calls name in their metadata
    model: str  # the name that requests give
    tokenizer: str  # folder of the checkpoint that is served
    tools: str  # folder of the checkpoint with a format for tools
    work: Path  # an empty folder for the client's files

    @property
    def api(self) -> str:
        return f"{self.url}/v1"

    def with_tools(self) -> Target:
        """The application with tools."""
        return replace(
            self,
            url=f"{self.url}/{TOOLS}",
            application=TOOLS,
            model=TOOLS,
            tokenizer=self.tools,
        )

    def environment(self) -> dict[str, str]:
        """The variables from which `from_environment` makes it again."""
        return {f"CLIENTS_{name.upper()}": str(value) for name, value in asdict(self).items()}

    @classmethod
    def from_environment(cls) -> Target:
        values = {name: os.environ[f"CLIENTS_{name.upper()}"] for name in cls.__slots__}
        return cls(**values | {"work": Path(values["work"])})


@dataclass(frozen=True, slots=True)
class Count:
    """How many were right, of how many."""

    num: int
    of: int
    unit: str
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a check found."""

    check: str
    num: int
    of: int
    unit: str
    error: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, line: str) -> Outcome | None:
        """An outcome from a line of a script's output; None for a line that a library printed."""
        return cls(**json.loads(line)) if line.startswith('{"check": ') else None


Check = Callable[[Target], Count | None]


def run(checks: Sequence[Check]) -> None:
    """Run the checks and print their outcomes."""
    target = Target.from_environment()
    for check in checks:
        print(json.dumps(asdict(_outcome(check, target))), flush=True)


def _outcome(check: Check, target: Target) -> Outcome:
    name = check.__name__
    try:
        found = check(target) or Count(1, 1, "ok")
    except Exception as error:  # any that the client raises
        where = traceback.extract_tb(error.__traceback__)[1:2]
        lines = [f"line {frame.lineno}: {frame.line}" for frame in where]
        text = "; ".join([f"{type(error).__name__}: {error}", *lines])[:_MAX_ERROR_CHARS]
        return Outcome(name, 0, 1, "ok", text)
    return Outcome(name, found.num, found.of, found.unit, "", found.details)
