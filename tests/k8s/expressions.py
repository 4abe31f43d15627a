"""PromQL expressions of the alerts, the dashboard and the documents, and what they need to exist.

Prometheus does not complain about a name or a label that does not exist: an alert with a typing error never fires.
`promtool` checks the grammar of the rules; this checks their names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import yaml
from prometheus_client.samples import Sample

from .manifests import K8S, ROOT

FOLDER = K8S / "observability"
DASHBOARD: dict[str, Any] = json.loads(
    (FOLDER / "grafana_dashboard.json").read_text(encoding="utf-8")
)
RULES: dict[str, Any] = yaml.safe_load((FOLDER / "prometheusrule.yaml").read_text(encoding="utf-8"))

_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"')
_GROUPING = re.compile(
    r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)", re.IGNORECASE
)
_MATCHER = re.compile(r"(\w+)\s*(=~|!~|!=|=)\s*#(\d+)#")
# A name with its matchers, but no function and no part of a number.
_SELECTOR = re.compile(r"(?<![\w:.])([a-zA-Z_:][\w:]*)(?![\w:])\s*(?:\{([^{}]*)\})?(?!\s*\()")
_WORDS = frozenset(("and", "or", "unless", "bool", "offset", "inf", "nan"))

# The labels of a kind of series, with their values; an empty set if they are not known.
Labels = Mapping[str, frozenset[str]]


class Selector(NamedTuple):
    """A metric in an expression, and the label values that it is matched with: label, operator, value."""

    name: str
    matchers: tuple[tuple[str, str, str], ...]


def alerts() -> list[dict[str, Any]]:
    return [rule for group in RULES["spec"]["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    """The panels of the dashboard, without the rows that they are in."""
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[str]:
    """Of the documents, the alerts, the panels and the dashboard's variables."""
    for name in ("metrics.md", "alerts.md"):
        text = (ROOT / "docs" / name).read_text(encoding="utf-8")
        yield from re.findall(r"```promql\n(.*?)```", text, re.DOTALL)
    yield from (rule["expr"] for rule in alerts())
    yield from (target["expr"] for panel in panels() for target in panel["targets"])
    for variable in DASHBOARD["templating"]["list"]:
        found = re.fullmatch(r"label_values\((\w+), (\w+)\)", str(variable.get("query")))
        if found:
            yield f"sum by ({found[2]}) ({found[1]})"


def concerns_tenants(expression: str) -> bool:
    """Whether it has metrics that exist only with keys."""
    return "quire_tenant_" in expression or "quire_calls_denied_" in expression


def selectors(expression: str) -> tuple[list[Selector], set[str]]:
    """Return the metrics of an expression, and the labels that it groups by."""
    texts: list[str] = []

    def kept(match: re.Match[str]) -> str:
        texts.append(match[0][1:-1])
        return f"#{len(texts) - 1}#"

    bare = _TEXT.sub(kept, expression)
    grouped = {
        label.strip() for labels in _GROUPING.findall(bare) for label in labels.split(",") if label
    }
    bare = re.sub(r"\[[^\]]*\]", "", _GROUPING.sub("", bare))
    found = []
    for match in _SELECTOR.finditer(bare):
        if match[1].lower() not in _WORDS:
            matchers = tuple(
                (label, operator, texts[int(i)])
                for label, operator, i in _MATCHER.findall(match[2] or "")
            )
            found.append(Selector(match[1], matchers))
    return found, grouped


def problems(expression: str, series: Mapping[str, Sequence[Labels]]) -> list[str]:
    """Return what an expression names and `series`, by name the kinds of series, does not have."""
    named, grouped = selectors(expression)
    found = [] if named else [f"no metric in {expression!r}"]
    for name, matchers in named:
        if name not in series:
            found.append(f"no metric {name}")
            continue
        kinds = series[name]
        for label, operator, text in matchers:
            kinds = [kind for kind in kinds if label in kind]
            known = frozenset[str]().union(*(kind[label] for kind in kinds))
            if not kinds:
                found.append(f"{name} has no label {label}")
            elif "$" not in text and known:
                values = set(text.split("|") if "~" in operator else [text])
                found += [f"{name}: {label} is never {value!r}" for value in values - known]
                if "!" not in operator:
                    kinds = [kind for kind in kinds if kind[label] & values]
        lacking = {label for kind in kinds for label in grouped - kind.keys()}
        found += [f"{name} has no label {label}" for label in sorted(lacking)]
    return found


def series_of(samples: Iterable[Sample]) -> dict[str, list[Labels]]:
    """The kinds of series by name: one for each set of labels, with the values that they have."""
    found: dict[str, dict[frozenset[str], dict[str, set[str]]]] = {}
    for sample in samples:
        kinds = found.setdefault(sample.name, {})
        values = kinds.setdefault(
            frozenset(sample.labels), {label: set() for label in sample.labels}
        )
        for label, value in sample.labels.items():
            values[label].add(value)
    return {
        name: [
            {label: frozenset(values) for label, values in kind.items()} for kind in kinds.values()
        ]
        for name, kinds in found.items()
    }
