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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_MAX_ERROR_CHARS = 500


@dataclass(frozen=True, slots=True)
class Target:
    """A running server."""

    url: str  # http://HOST:PORT
    grpc: str  # HOST:PORT
    model: str  # the name that requests give
    tokenizer: str  # folder of the checkpoint that is served
    work: Path  # an empty folder for the client's files

    @property
    def api(self) -> str:
        return f"{self.url}/v1"

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
    is_served: bool = (
        True  # False: the server does not have it yet, and the check is expected to fail
    )
    details: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, line: str) -> Outcome | None:
        """An outcome from a line of a script's output; None for a line that a library printed."""
        return cls(**json.loads(line)) if line.startswith('{"check": ') else None


Check = Callable[[Target], Count | None]


def run(checks: Sequence[Check], not_served: Sequence[Check] = ()) -> None:
    """Run the checks and print their outcomes.

    Parameters
    ----------
    not_served
        Checks of what the server does not have yet.
    """
    target = Target.from_environment()
    for check in (*checks, *not_served):
        print(json.dumps(asdict(_outcome(check, target, check not in not_served))), flush=True)


def _outcome(check: Check, target: Target, is_served: bool) -> Outcome:
    name = check.__name__
    try:
        found = check(target) or Count(1, 1, "ok")
    except Exception as error:  # whatever the client raises
        where = traceback.extract_tb(error.__traceback__)[1:2]
        lines = [f"line {frame.lineno}: {frame.line}" for frame in where]
        text = "; ".join([f"{type(error).__name__}: {error}", *lines])[:_MAX_ERROR_CHARS]
        return Outcome(name, 0, 1, "ok", text, is_served)
    return Outcome(name, found.num, found.of, found.unit, "", is_served, found.details)
