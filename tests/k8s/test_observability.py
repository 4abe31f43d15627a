"""The dashboard, the alerts and their documents: valid, and about metrics that exist; promtool tries each alert."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from quire.cluster.auth.tenant_counters import TENANT_FAMILIES
from quire.cluster.scrape import SCRAPE_FAMILIES
from quire.protos.metric_families import HISTOGRAM, MetricSet, join
from quire.replica.serving.replica_metrics import REPLICA_FAMILIES
from quire.router.request.router_metrics import ROUTER_FAMILIES

from . import manifest_checks as checks
from .expressions import (
    DASHBOARD,
    FOLDER,
    RULES,
    Labels,
    alerts,
    expressions,
    panels,
    problems,
    selectors,
)
from .manifests import K8S, ROOT, load, render

RUNBOOK = (ROOT / "docs" / "alerts.md").read_text(encoding="utf-8")
METRICS_PAGE = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
ALERT_TESTS = Path(__file__).parent / "alert_tests.yaml"
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool (Debian package prometheus) is not installed"
)

# --------------------------------------------------------------------------------------------------
# Names
# --------------------------------------------------------------------------------------------------


def declared() -> dict[str, list[Labels]]:
    """All series as the code declares them."""
    found: dict[str, list[Labels]] = {}
    sets = (
        ((*ROUTER_FAMILIES, *TENANT_FAMILIES), {"deployment": {"Router"}, "router": set()}),
        (REPLICA_FAMILIES, {"deployment": {"Replica"}, "replica": set()}),
        (SCRAPE_FAMILIES, {}),
    )
    for families, process in sets:
        for family in families:
            labels = {"application": set(), "model_name": set(), **process}
            labels |= {label: set(family.values) for label in family.labels}
            ends = ("_sum", "_count", "_bucket") if family.kind == HISTOGRAM else ("",)
            for end in ends:
                kind = labels | {"le": set()} if end == "_bucket" else labels
                known = {label: frozenset(values) for label, values in kind.items()}
                found.setdefault(family.name + end, []).append(known)
    return found


DECLARED = declared()


@pytest.mark.parametrize("expression", dict.fromkeys(expressions()))
def test_an_expression_names_what_the_code_declares(expression: str) -> None:
    assert problems(expression, DECLARED) == []


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("rate(quire_no_such_total[5m])", "no metric quire_no_such_total"),
        ("sum by (replica) (quire_router_queued_requests)", "has no label replica"),
        ('quire_requests_refused_total{kode="overloaded"}', "has no label kode"),
        ('quire_requests_refused_total{code=~"overloaded|overlooked"}', "never 'overlooked'"),
        ('quire_process_cpu_seconds_total{deployment="Routers"}', "never 'Routers'"),
        ("quire_time_to_first_token_seconds", "no metric"),
        ("sum by (le) (quire_request_seconds_sum)", "has no label le"),
        ("1e6 * 5", "no metric in"),
        ("quire_kv_blocks_free and quire_kv_blocks_fre", "no metric quire_kv_blocks_fre"),
    ],
)
def test_a_wrong_name_is_found(expression: str, problem: str) -> None:
    (found,) = problems(expression, DECLARED)
    assert problem in found


def test_every_metric_of_an_expression_is_seen() -> None:
    """As many names with our prefix as the text has."""
    for expression in expressions():
        named = [selector.name for selector in selectors(expression)[0]]
        assert named == re.findall(r"\bquire_\w+", expression)


def test_counters_are_read_as_rates() -> None:
    for expression in expressions():
        for name in re.findall(r"\bquire_\w+(?:_total|_bucket|_sum|_count)\b", expression):
            pattern = rf"(rate|increase)\({name}(\{{[^}}]*\}})?\[[^\]]+\]\)"
            assert re.search(pattern, expression), expression


# --------------------------------------------------------------------------------------------------
# The dashboard
# --------------------------------------------------------------------------------------------------


def grafana_problems(dashboard: dict[str, Any]) -> Iterator[str]:
    """Validate a dashboard, its panels' options and their queries against Grafana's schemas."""

    def errors(page: str, kind: str, value: Any) -> Iterator[str]:
        path = Path(__file__).parent / "schemas" / "grafana" / f"{page}.jsonschema.json"
        schema = json.loads(path.read_text(encoding="utf-8")) | {"$ref": f"#/definitions/{kind}"}
        for error in jsonschema.Draft7Validator(schema).iter_errors(value):
            yield f"{kind}: {error.message}"

    yield from errors("dashboard", "Dashboard", dashboard)
    for panel in dashboard["panels"]:
        if panel["type"] == "timeseries":
            yield from errors("timeseries", "Options", panel["options"])
            custom = panel["fieldConfig"]["defaults"].get("custom", {})
            yield from errors("timeseries", "FieldConfig", custom)
            for target in panel["targets"]:
                yield from errors("prometheus", "Dataquery", target)


def test_the_dashboard_fits_grafanas_schema() -> None:
    assert list(grafana_problems(DASHBOARD)) == []


def test_grafanas_schema_finds_faults() -> None:
    first = next(i for i, p in enumerate(DASHBOARD["panels"]) if p["type"] == "timeseries")
    for path, value in (
        (("schemaVersion",), "39"),
        (("pannels",), []),
        (("panels", first, "gridpos"), {}),
        (("panels", first, "gridPos", "w"), "wide"),
        (("panels", first, "options", "legend", "placement"), "above"),
        (("panels", first, "targets", 0, "expression"), "up"),
        (("panels", first, "fieldConfig", "defaults", "units"), "s"),
    ):
        faulty: Any = copy.deepcopy(DASHBOARD)
        place = faulty
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        assert list(grafana_problems(faulty)), path


def test_panels_do_not_overlap_and_have_titles_units_and_the_chosen_source() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not taken & cells and at["x"] + at["w"] <= 24
        taken |= cells
        assert panel["title"]
    for panel in panels():
        assert panel["fieldConfig"]["defaults"]["unit"]
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert all(source["uid"] == "${datasource}" for source in sources)
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)
    for key in ("id", "title"):
        values = [panel[key] for panel in DASHBOARD["panels"]]
        assert len(set(values)) == len(values)


def test_every_panel_shows_the_chosen_application_and_model() -> None:
    for panel in panels():
        for target in panel["targets"]:
            for selector in selectors(target["expr"])[0]:
                chosen = {label: value for label, _, value in selector.matchers}
                assert chosen["application"] == "$application" and chosen["model_name"] == "$model"


# --------------------------------------------------------------------------------------------------
# The alerts
# --------------------------------------------------------------------------------------------------


def anchors(text: str) -> list[str]:
    return [title.lower() for title in re.findall(r"^### (\w+)$", text, re.MULTILINE)]


def test_each_alert_has_its_section_and_each_section_its_alert() -> None:
    named = [rule["alert"] for rule in alerts()]
    assert len(set(named)) == len(named)
    for rule in alerts():
        wanted = f"docs/alerts.md#{rule['alert'].lower()}"
        assert rule["annotations"]["runbook_url"] == wanted
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert rule["annotations"]["summary"].endswith(".")
        assert rule["annotations"]["description"].endswith(".")
        assert rule["for"]
    assert anchors(RUNBOOK) == [name.lower() for name in named]


def test_the_address_of_the_runbook_is_set_in_one_place(tmp_path: Path) -> None:
    folder = tmp_path / "observability"
    shutil.copytree(K8S / "observability", folder)
    runbooks = folder / "runbooks.yaml"
    text = runbooks.read_text(encoding="utf-8")
    url = "https://docs.example.com/alerts/"
    runbooks.write_text(text.replace("url: docs/alerts.md", f"url: {url}"), encoding="utf-8")
    docs = render(folder)
    (rules,) = (doc for doc in docs if doc["kind"] == "PrometheusRule")
    found = [rule for group in rules["spec"]["groups"] for rule in group["rules"]]
    assert len(found) == len(alerts())
    for rule in found:
        assert rule["annotations"]["runbook_url"] == f"{url}#{rule['alert'].lower()}"
    assert "quire-runbooks" not in {doc["metadata"]["name"] for doc in docs}


def test_panels_that_the_runbook_names_exist() -> None:
    titles = {panel["title"] for panel in panels()}
    named = set(re.findall(r'"([A-Z][^"\n]{3,})"', re.sub(r"\n *", " ", RUNBOOK)))
    assert len(named) > 8
    assert {name for name in named if not any(t.startswith(name) for t in titles)} == set()


def test_annotations_read_labels_that_the_expression_has() -> None:
    for rule in alerts():
        _, grouped = selectors(rule["expr"])
        used = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
        assert used <= grouped - {"le"}, rule["alert"]


def test_the_manifests_fit_their_schemas_and_the_kustomization_names_them_all() -> None:
    (kustomization,) = load(FOLDER / "kustomization.yaml")
    files = {*kustomization["resources"]}
    for name in kustomization["resources"]:
        for doc in load(FOLDER / name):
            assert list(checks.schema(doc)) == [], name
    for generator in kustomization["configMapGenerator"]:
        files |= {*generator["files"]}
    assert files | {"kustomization.yaml"} == {path.name for path in FOLDER.iterdir()}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kubectl_renders_the_dashboard_into_a_map_that_grafana_finds() -> None:
    command = ["kubectl", "kustomize", str(FOLDER)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    docs = {doc["kind"]: doc for doc in yaml.safe_load_all(printed)}
    assert docs.keys() == {"ConfigMap", "PodMonitor", "PrometheusRule"}
    config_map = docs["ConfigMap"]
    assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(config_map["data"]["grafana_dashboard.json"]) == DASHBOARD
    # `kubectl apply` keeps the whole object in an annotation, and those have at most this many bytes.
    assert len(json.dumps(config_map)) < 262_144


# --------------------------------------------------------------------------------------------------
# promtool
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    """The rules as Prometheus itself reads them."""
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump(RULES["spec"]), encoding="utf-8")
    return path


def promtool(*args: str, folder: Path, text: str = "") -> str:
    """Run promtool; fail with what it says."""
    ran = subprocess.run(
        ["promtool", *args], cwd=folder, input=text, capture_output=True, text=True, timeout=60
    )
    output = ran.stdout + ran.stderr
    assert ran.returncode == 0, output
    return output


@needs_promtool
def test_promtool_accepts_the_rules(rules: Path) -> None:
    output = promtool("check", "rules", rules.name, folder=rules.parent)
    assert f"{len(alerts())} rules found" in output


@needs_promtool
def test_promtool_can_parse_every_expression_of_a_panel_and_a_document(tmp_path: Path) -> None:
    asked = [re.sub(r"\$__rate_interval", "1m", one) for one in expressions()]
    rules = [{"record": f"panel:{i}", "expr": one} for i, one in enumerate(asked)]
    path = tmp_path / "panels.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    assert f"{len(asked)} rules found" in promtool("check", "rules", path.name, folder=tmp_path)


@needs_promtool
def test_alerts_fire_when_they_should(rules: Path) -> None:
    """`alert_tests.yaml` has series for each alert, and says when it fires and when it does not."""
    tests = yaml.safe_load(ALERT_TESTS.read_text(encoding="utf-8"))
    cases = [case for test in tests["tests"] for case in test["alert_rule_test"]]
    fire = {case["alertname"] for case in cases if case.get("exp_alerts")}
    are_silent = {case["alertname"] for case in cases if not case.get("exp_alerts")}
    assert fire == are_silent == {rule["alert"] for rule in alerts()}
    shutil.copy(ALERT_TESTS, rules.parent)
    promtool("test", "rules", ALERT_TESTS.name, folder=rules.parent)


@needs_promtool
def test_promtool_accepts_the_exposition(tmp_path: Path) -> None:
    sets = (ROUTER_FAMILIES, REPLICA_FAMILIES, SCRAPE_FAMILIES, TENANT_FAMILIES)
    text = join(MetricSet(families).page({"process": "p"}) for families in sets).decode()
    assert promtool("check", "metrics", folder=tmp_path, text=text) == ""


# --------------------------------------------------------------------------------------------------
# Ray's Grafana
# --------------------------------------------------------------------------------------------------


def test_rays_grafana_loads_a_dashboard_that_lies_in_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray writes its own dashboards there at each start, and lets ours be: see docs/metrics.md."""
    metrics_head = pytest.importorskip("ray.dashboard.modules.metrics.metrics_head")
    folder = tmp_path / "dashboards"
    monkeypatch.setenv(metrics_head.GRAFANA_DASHBOARD_OUTPUT_DIR_ENV_VAR, str(folder))
    assert metrics_head.GRAFANA_DASHBOARD_OUTPUT_DIR_ENV_VAR in METRICS_PAGE
    folder.mkdir()
    shutil.copy(FOLDER / "grafana_dashboard.json", folder / "quire.json")
    head = metrics_head.MetricsHead.__new__(metrics_head.MetricsHead)
    session = tmp_path / "session" / "metrics" / "grafana"
    head._grafana_config_output_path = str(session)
    head._grafana_session_latest_config_output_path = str(session)
    head._grafana_dashboard_output_dir = str(folder)
    head._prometheus_name, head._dashboard_uids = "Prometheus", {}
    for _ in range(2):
        head._create_default_grafana_configs()
    (provider,) = yaml.safe_load(
        (session / "provisioning" / "dashboards" / "default.yml").read_text(encoding="utf-8")
    )["providers"]
    assert provider["options"]["path"] == str(folder)
    boards = {path.name: json.loads(path.read_text()) for path in folder.glob("*.json")}
    assert boards["quire.json"] == DASHBOARD and len(boards) > 3
    uids = [board["uid"] for board in boards.values()]
    assert len(set(uids)) == len(uids)
