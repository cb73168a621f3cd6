"""Makes docs/metrics.md from the catalogue of metrics; with --check only says whether it is up to date."""

from __future__ import annotations

import sys
from pathlib import Path

from outrider.telemetry.metrics.catalogue import SECTIONS, MetricSpec

PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"

HEAD = """\
# Metrics

<!-- Made by scripts/generate_metrics.py from outrider/telemetry/metrics/catalogue.py; then `make docs`. -->

Each of the three processes gives metrics to Prometheus over HTTP, at `/metrics` of its `metrics_port`
([configuration](configuration.md)). Without a port none are served and nothing of it is imported, which is the
default: a process opens no second port unasked. `outrider serve --metrics-port 9464` gives the coordinator 9464, the
target 9465 and the draft 9466. `pip install 'outrider[telemetry]'` brings the library for it.

Names after the prefix are vLLM's where vLLM has the metric. Counting costs a few additions to plain numbers; the form
that Prometheus reads is made when it asks. Where nothing was drafted, shares are no data rather than 0: every divisor
has to be above 0. A quantile of nothing is NaN, which Grafana leaves out and which fires no alert. Besides these, each
process gives `process_*` and `python_*`, the metrics of the Prometheus client.

`k8s/outrider/files/dashboard.json` is a dashboard for Grafana and `k8s/outrider/files/alerts.yaml` are alert rules;
what to do when one fires is in [operations](operations.md). `$__rate_interval` in the expressions below is Grafana's;
write `5m` or the like elsewhere.
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
    return HEAD + "".join(section_text(title, specs) for title, specs in SECTIONS.items())


def section_text(title: str, specs: tuple[MetricSpec, ...]) -> str:
    """One section: an entry for each metric."""
    return f"\n## {title}\n" + "".join(map(entry, specs))


def entry(spec: MetricSpec) -> str:
    """Name, kind, meaning, labels, expression."""
    labels = "".join(f"- `{label.name}`: {label.text}\n" for label in spec.labels)
    of = "all three" if len(spec.roles) == 3 else " and ".join(spec.roles)
    what = f"{spec.kind.value.capitalize()}, of {of}. {spec.text}"
    return f"\n### `{spec.name}`\n\n{what}\n{labels}\n```promql\n{spec.promql}\n```\n"


if __name__ == "__main__":
    sys.exit(main())
