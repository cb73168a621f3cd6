"""Generator of docs/metrics.md from the catalogue of metrics; with --check it only compares."""

from __future__ import annotations

import sys
from pathlib import Path

from outrider.telemetry.metrics.catalogue import SECTIONS, MetricKind, MetricSpec, find
from outrider.telemetry.metrics.vllm_names import VLLM_NAMES

PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"

HEAD = """\
# Metrics

<!-- Made by scripts/generate_metrics.py from outrider/telemetry/metrics/catalogue.py; then `make docs`. -->

Coordinator, target, draft and HTTP gateway serve metrics for Prometheus over HTTP, at `/metrics` of their
`metrics_port` ([configuration](configuration.md)). The default is no port: nothing is served, and the library is not
imported. `outrider serve --metrics-port 9464` gives the coordinator port 9464, the target 9465 and the draft 9466; the
gateway has a port only if `gateway.metrics_port` is set. In the chart each service has one. The library comes with the
extra `telemetry`. Each process also serves `process_*` and `python_*`, the metrics of the Prometheus client.

Figures are kept as plain numbers and turned into Prometheus' form when it scrapes. Every divisor in the expressions
below is above 0, so that a share of nothing is no data rather than 0. A quantile of nothing is NaN, which Grafana
leaves out and which fires no alert.

`k8s/outrider/files/dashboard.json` is a dashboard for Grafana, and `k8s/outrider/files/alerts.yaml` has alert rules;
[operations](operations.md) says what to do when one fires. `$__rate_interval` in the expressions is Grafana's; write
`5m` elsewhere.
"""

VLLM = """
## vLLM's names

With `vllm_metric_names`, coordinators and targets serve the metrics of this table under vLLM's names as well, with the
labels `model_name` and `engine`: for inference gateways, autoscaling recipes and dashboards that were made for vLLM.
Only metrics with the same meaning are in it. The bounds of histograms differ from vLLM's. A draft serves none, since
sums over all processes would count it as a second model.

| vLLM's name | of | this page's name |
|---|---|---|
"""


def main() -> int:
    """Write the page, or compare with it."""
    text = render()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    sys.stderr.write(f"{PAGE} is stale: run `make docs`\n")
    return 1


def render() -> str:
    """The page."""
    return HEAD + "".join(section_text(title, specs) for title, specs in SECTIONS.items()) + VLLM + vllm_table()


def vllm_table() -> str:
    """Rows of vLLM's names."""
    return "".join(
        f"| `{vllm.name}{'_total' * (find(name).kind is MetricKind.COUNTER)}` | {role} | `{name}` |\n"
        for role, names in VLLM_NAMES.items()
        for name, vllm in names.items()
    )


def section_text(title: str, specs: tuple[MetricSpec, ...]) -> str:
    """One section: an entry for each metric."""
    return f"\n## {title}\n" + "".join(map(entry, specs))


def entry(spec: MetricSpec) -> str:
    """Name, kind, meaning, labels, expression."""
    labels = "".join(f"- `{label.name}`: {label.text}\n" for label in spec.labels)
    of = {3: "all three", 4: "all four"}.get(len(spec.roles)) or " and ".join(spec.roles)
    what = f"{spec.kind.value.capitalize()}, of {of}. {spec.text}"
    return f"\n### `{spec.name}`\n\n{what}\n{labels}\n```promql\n{spec.promql}\n```\n"


if __name__ == "__main__":
    sys.exit(main())
