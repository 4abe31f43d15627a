"""docs/metrics.md and the Grafana dashboard agree with the code."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.cluster.auth.tenant_counters import TENANT_FAMILIES
from quire.cluster.scrape import SCRAPE_FAMILIES
from quire.protos.metric_families import HISTOGRAM, Family
from quire.replica.serving.replica_metrics import REPLICA_FAMILIES
from quire.router.request.router_metrics import ROUTER_FAMILIES

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
DASHBOARD = json.loads((ROOT / "k8s" / "grafana_dashboard.json").read_text(encoding="utf-8"))
SETS = {
    "routers": (*ROUTER_FAMILIES, *TENANT_FAMILIES),
    "replicas": REPLICA_FAMILIES,
    "the scrape": SCRAPE_FAMILIES,
}
FAMILIES = {family.name: family for families in SETS.values() for family in families}
LABELS = {"application", "model_name", "deployment", "router", "replica", "le"}


def row(family: Family, of: str) -> str:
    labels = ", ".join(f"`{label}`" for label in family.labels)
    return f"| `{family.name}` | {family.kind} | {family.unit} | {of} | {labels} | {family.help} |"


def rows() -> list[str]:
    """Of the table in the docs, one for each family."""
    found: dict[str, tuple[Family, list[str]]] = {}
    for of, families in SETS.items():
        for family in families:
            found.setdefault(family.name, (family, []))[1].append(of)
    return [row(family, ", ".join(of)) for family, of in found.values()]


def test_the_table_has_every_family_as_it_is():
    table = [line for line in DOCS.splitlines() if line.startswith("| `quire_")]
    assert table == rows(), "as it should be:\n" + "\n".join(rows())


def expressions() -> Iterator[str]:
    yield from re.findall(r"```promql\n(.*?)```", DOCS, re.DOTALL)
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]


@pytest.mark.parametrize("expression", expressions())
def test_an_expression_names_what_there_is(expression):
    """Families, and of histograms the series that they have; labels that the family has."""
    names = set(re.findall(r"quire_\w+", expression))
    assert names
    used = set()
    for group in re.findall(r"by \(([^)]*)\)", expression):
        used |= {label.strip() for label in group.split(",")}
    used |= set(re.findall(r"(\w+)=~?\"", expression))
    known = set(LABELS)
    for name in names:
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        family = FAMILIES.get(name) or FAMILIES[base]
        assert (family.kind == HISTOGRAM) == (name not in FAMILIES), name
        known |= set(family.labels)
    assert used <= known


def test_counters_are_read_as_rates():
    for expression in expressions():
        for name in re.findall(r"quire_\w+(?:_total|_bucket|_sum|_count)\b", expression):
            pattern = rf"(rate|increase)\({name}(\{{[^}}]*\}})?\[[^\]]+\]\)"
            assert re.search(pattern, expression), expression


def test_panels_do_not_overlap_and_have_titles_and_units():
    taken = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not taken & cells and at["x"] + at["w"] <= 24
        taken |= cells
        assert panel["title"] and panel["fieldConfig"]["defaults"]["unit"]
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
