"""Problems of a configuration, and the error that lists them."""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from quire.cluster.config.section import Section


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a configuration: its path (`a.b[0].c`, empty for the whole) and a message."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class ConfigError(ValueError):
    """The configuration cannot be used; the text lists every problem, one per line."""

    def __init__(self, problems: Iterable[Problem]):
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return the end of a message: `; did you mean 'x'?` with the nearest known word, or all known words."""
    known = sorted(known)
    close = difflib.get_close_matches(str(word), known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(known)}" if known else ""


def join_path(prefix: str, part: str | int) -> str:
    """Append a key (`.key`) or an index (`[0]`) to the path of a problem."""
    if isinstance(part, int):
        return f"{prefix}[{part}]"
    return f"{prefix}.{part}" if prefix else part


def problems_from(
    error: ValidationError, model: type[Section] | None = None, prefix: str = ""
) -> list[Problem]:
    """Translate pydantic's errors to problems.

    Parameters
    ----------
    error
        The result of validating `model`.
    model
        The validated model; its fields are the candidates for "did you mean". None: problems with unknown keys are
        skipped, because the caller reports them.
    prefix
        Path of the validated mapping inside the file.
    """
    problems = []
    for item in error.errors(include_url=False):
        path = prefix
        for part in item["loc"]:
            path = join_path(path, part)
        value = item["input"]
        if item["type"] == "extra_forbidden":
            if model is None:
                continue
            known = _fields_at(model, item["loc"][:-1])
            message = f"unknown key{did_you_mean(item['loc'][-1], known)}"
        elif item["type"] == "value_error":
            message = str(item["ctx"]["error"])
        else:
            message = f"{_bound(item['msg'])}, got {shortened(value)}"
            if item["type"] == "literal_error" and isinstance(value, str):
                choices = re.findall(r"'([^']*)'", item["ctx"]["expected"])
                message += did_you_mean(value, choices).partition("; known")[0]
        problems.append(Problem(path, message))
    return problems


def _fields_at(model: type[Section], loc: tuple[str | int, ...]) -> list[str]:
    """Names of the fields of the nested model at `loc`."""
    for part in loc:
        annotation: Any = model.model_fields[str(part)].annotation
        # An optional section is annotated `Section | None`.
        sections = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
        model = sections[0] if sections else annotation
    return [*model.model_fields, *model.aliases]


def _bound(message: str) -> str:
    """Rewrite pydantic's message in the terms of YAML, such as "mapping" for "dictionary"."""
    message = re.sub(r"a valid dictionary( or instance of \w+)?", "a mapping", message)
    return message.replace("Input should be", "must be").replace("Input should", "must")


def shortened(value: object, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
