"""The dashboard, the alert rules and the page of metrics speak of metrics that exist, with labels that they have.

That the processes really give every catalogued metric, and no other, is tested in tests/end_to_end/test_metrics.py.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from outrider.telemetry.metrics.catalogue import CATALOGUE, MetricKind, MetricSpec
from outrider_coordinator.stats.spec_decode_stats import WithoutDraft

ROOT = Path(__file__).parents[2]
FILES = ROOT / "k8s" / "outrider" / "files"
DASHBOARD: dict[str, Any] = json.loads((FILES / "dashboard.json").read_text())
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"] for rule in group["rules"]
]
PROCESS = {"process_start_time_seconds"}
"""Metrics of the Prometheus client."""
OF_SCRAPING = {"namespace", "job", "instance", "le"}
"""Labels that Prometheus and histograms bring."""

NAME = re.compile(r"\b(?:outrider|process)_[a-z0-9_]+")
SELECTED = re.compile(r"\b((?:outrider|process)_[a-z0-9_]+)\{([^}]*)\}")
GROUPED = re.compile(r"\b(?:by|on|ignoring|group_left) \(([^)]*)\)")


def samples() -> dict[str, MetricSpec]:
    """Every name that may stand in an expression."""
    found: dict[str, MetricSpec] = {}
    for spec in CATALOGUE:
        ends = ("_bucket", "_sum", "_count") if spec.kind is MetricKind.HISTOGRAM else ("",)
        found.update({spec.name + end: spec for end in ends})
    return found


def check_expression(expression: str) -> None:
    known = samples()
    names = set(NAME.findall(expression))
    assert names, expression
    assert names <= known.keys() | PROCESS, expression
    labels = {label.name for name in names - PROCESS for label in known[name].labels} | OF_SCRAPING
    for name, selector in SELECTED.findall(expression):
        own = {label.name for label in known[name].labels} if name in known else set()
        assert set(re.findall(r"(\w+)\s*(?:=|!)", selector)) <= own | OF_SCRAPING, expression
    for grouping in GROUPED.findall(expression):
        assert {label.strip() for label in grouping.split(",")} - {""} <= labels | {
            "role",
            "version",
            "commit",
            "model",
        }


def check_divisors(expression: str) -> None:
    """Nothing is divided by nothing: a divisor is above 0, or a sum that is."""
    for divisor in expression.split(" / ")[1:]:
        assert "> 0)" in divisor, expression


def graphs() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def test_the_system_efficiency_is_that_of_vllm() -> None:
    """(accepted + drafts) / (draft tokens + drafts), in the catalogue and on the dashboard."""
    (panel,) = [panel for panel in graphs() if panel["title"] == "System efficiency"]
    in_catalogue = samples()["outrider_spec_decode_num_draft_tokens_total"].promql
    for expression in (panel["targets"][0]["expr"], in_catalogue):
        form = re.sub(r"sum ?\(rate\(outrider_spec_decode_num_(\w+)_total[^()]*\)\)", r"\1", expression)
        assert form == "(accepted_tokens + drafts) / (draft_tokens + drafts > 0)"


@pytest.mark.parametrize("panel", graphs(), ids=lambda panel: panel["title"])
def test_every_panel_reads_metrics_that_exist(panel: dict[str, Any]) -> None:
    assert panel["targets"]
    for target in panel["targets"]:
        check_expression(target["expr"])
        check_divisors(target["expr"])
        assert '{namespace=~"$namespace",job=~"$job"' in target["expr"]
        assert target["datasource"]["uid"] == "${datasource}"


def test_the_dashboard_has_its_rows_and_variables() -> None:
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert rows == ["Speculation", "Latency", "Load", "HTTP gateway", "Recovery"]
    assert [variable["name"] for variable in DASHBOARD["templating"]["list"]] == ["datasource", "namespace", "job"]
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    places = [tuple(panel["gridPos"].values()) for panel in DASHBOARD["panels"]]
    assert len(set(places)) == len(places)


def test_every_metric_is_on_the_dashboard_or_beside_it() -> None:
    text = json.dumps(DASHBOARD)
    beside = {"outrider_sessions_opened_total"}
    assert {spec.name for spec in CATALOGUE if spec.name not in text} == beside


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_every_alert_reads_metrics_that_exist_and_says_what_to_do(rule: dict[str, Any]) -> None:
    check_expression(rule["expr"])
    assert rule["labels"]["severity"] in {"info", "warning", "critical"}
    assert rule["annotations"]["summary"]
    assert rule["annotations"].keys() == {"summary", "operations_section"}  # a URL is for who knows where the page is
    headings = re.findall(r"^#+ (.*)$", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert rule["annotations"]["operations_section"] in anchors, sorted(anchors)


@pytest.mark.parametrize("spec", CATALOGUE, ids=lambda spec: spec.name)
def test_every_example_reads_metrics_that_exist(spec: MetricSpec) -> None:
    check_expression(spec.promql)
    check_divisors(spec.promql)
    assert spec.name in spec.promql


def test_people_read_of_one_acceptance_rate() -> None:
    text = json.dumps([DASHBOARD, RULES]).lower()
    assert "acceptance rate" in text
    assert "judged acceptance" not in text


def test_alerts_name_reasons_that_exist() -> None:
    named = {
        reason
        for rule in RULES
        for found in re.findall(r'outrider_steps_without_draft_total\{reason=~"([^"]*)"', rule["expr"])
        for reason in found.split("|")
    }
    assert named
    assert named <= {reason.value for reason in WithoutDraft}
    (label,) = next(spec for spec in CATALOGUE if spec.name == "outrider_steps_without_draft_total").labels
    assert set(label.text.split(", ")) == {reason.value for reason in WithoutDraft}


def test_a_name_that_does_not_exist_is_found() -> None:
    with pytest.raises(AssertionError):
        check_expression("sum(rate(outrider_step_total[5m]))")
    with pytest.raises(AssertionError):
        check_expression('outrider_kv_pages_free{side="target"}')


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not on the PATH: PromQL's syntax is unchecked"
)
def test_promtool_accepts_every_expression(tmp_path: Path) -> None:
    expressions = [
        *(target["expr"] for panel in graphs() for target in panel["targets"]),
        *(spec.promql for spec in CATALOGUE),
    ]
    rules = [
        {"record": f"e:{number}", "expr": expression.replace("$__rate_interval", "5m")}
        for number, expression in enumerate(expressions)
    ]
    mine = tmp_path / "rules.yaml"
    mine.write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}))
    for path in (FILES / "alerts.yaml", mine):
        outcome = subprocess.run(["promtool", "check", "rules", path], capture_output=True, text=True, check=False)
        assert outcome.returncode == 0, outcome.stdout + outcome.stderr
