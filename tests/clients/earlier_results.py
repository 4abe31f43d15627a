"""Keeps the results of clients that a run with `--only` left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.cluster.bench.results.report import Bar


def with_others(
    result: Mapping[str, Any], bars: list[Bar], versions: dict[str, str]
) -> tuple[list[Bar], dict[str, str]]:
    """Add the bars and versions of the other clients from an earlier result, sorted by client."""
    kept = [
        Bar(row["name"], row["value"], row["unit"], _goal(row), False, row.get("details", {}))
        for row in result["bars"]
        if _client_of(row["name"]) not in versions
    ]
    others = {_client_of(bar.name) for bar in kept}
    older = {name: version for name, version in result["versions"].items() if name in others}
    return (
        sorted([*kept, *bars], key=lambda bar: _client_of(bar.name)),
        dict(sorted((older | versions).items())),
    )


def _goal(row: Mapping[str, Any]) -> float:
    return float(row["goal"].removeprefix(">= "))


def _client_of(bar_name: str) -> str:
    return bar_name.split("/")[1]
