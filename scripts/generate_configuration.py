"""Makes docs/configuration.md from the settings' schema, and the list by which the chart knows a setting that is
misspelt; with --check only says whether they are up to date.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from outrider.config.client import CLIENT_VARIABLES
from outrider.config.reference import setting_rows
from outrider.config.schema import SECTIONS
from outrider.config.speculative import KEYS

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "configuration.md"
CHART = ROOT / "k8s" / "outrider" / "files" / "settings.json"

HEAD = """\
# Configuration

<!-- Made by scripts/generate_configuration.py from outrider/config/schema. Change it there, then `make docs`. -->

One schema serves `outrider serve` and each service started alone. It has four sections, `target`, `draft`,
`coordinator` and `gateway`. A value comes from the first of these that sets it:

1. **A flag.** `outrider target --page-size 32`; `outrider serve` has flags for what is set most often
   (`outrider serve --help`) and `--set SECTION.KEY=VALUE` for everything.
2. **The environment.** `OUTRIDER_TARGET_PAGE_SIZE=32`. An empty variable counts as unset. Variables that Kubernetes
   makes for a Service called `outrider-...` are passed over.
3. **A file.** `--config file.yaml` or `OUTRIDER_CONFIG=file.yaml`:
   ```yaml
   target:
     model: /models/target
     page_size: 32
   draft:
     model: /models/draft
   coordinator:
     num_speculative_tokens: 8
   ```
4. **The default** below.

An unknown key, in any of them, is an error that suggests the nearest known one. `outrider config` shows every setting
as `outrider serve` would use it, and where its value comes from.

`outrider serve` chooses free ports for the draft and target services and sets `coordinator.target_address` and
`coordinator.draft_address` itself. The gateway gets the coordinator's host, tokens and certificates unless it has its
own. It also drains without `drain_delay_s`, which is for load balancers, unless that is set.
"""

SPECULATIVE = """
## `speculative_config`: vLLM's keys

`outrider serve --speculative-config '{"model": "/models/draft", "num_speculative_tokens": 4}'`, the variable
`OUTRIDER_SPECULATIVE_CONFIG` (JSON) or the file's key `speculative_config`. Each key sets the setting beside it, with
the strength of the source it stands in; the same setting given twice in one source with different values is an error.
`acceptance_method` understands `rejection_sampler` and `typical_acceptance_sampler` too, `model: ngram` is method
`ngram`, and with only one of the two lookup bounds both are that one.

| key | setting |
|---|---|
"""


CLIENT = """
## Variables of clients

`Client`, `AsyncClient` and the commands that call a server (`outrider generate`, `outrider info`) read these where
their arguments or flags (`--tls-ca-file`, `--token-file` and so on) leave them open.

| variable | meaning |
|---|---|
"""


def main() -> int:
    """Write the files, or compare with them."""
    stale = 0
    for path, text in {PAGE: render(), CHART: chart_text()}.items():
        if "--check" not in sys.argv[1:]:
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            sys.stderr.write(f"{path} is stale: run `make docs`\n")
            stale = 1
    return stale


def render() -> str:
    """The page."""
    return (
        HEAD
        + "".join(section_text(name) for name in SECTIONS)
        + SPECULATIVE
        + speculative_rows()
        + CLIENT
        + client_rows()
    )


def chart_text() -> str:
    """Every section's keys."""
    keys = {name: sorted(row.key for row in setting_rows(section)) for name, section in SECTIONS.items()}
    return json.dumps(keys, indent=1) + "\n"


def section_text(name: str) -> str:
    """One section's table."""
    section = SECTIONS[name]
    lines = [f"| `{row.key}` | {row.default} | {row.description} |" for row in setting_rows(section)]
    prefix = f"OUTRIDER_{name.upper()}_"
    return (
        f"\n## `{name}`\n\n{(section.__doc__ or '').replace('``', '`')} Flags `--key`, variables `{prefix}KEY`.\n\n"
        "| key | default | meaning |\n|---|---|---|\n" + "\n".join(lines) + "\n"
    )


def speculative_rows() -> str:
    """The keys of vLLM."""
    rows = [f"| `{key}` | `{'.'.join(place)}` |" for key, place in KEYS.items()]
    return "\n".join(rows) + "\n"


def client_rows() -> str:
    """What callers read."""
    return "".join(f"| `{name}` | {meaning} |\n" for name, meaning in CLIENT_VARIABLES.items())


if __name__ == "__main__":
    sys.exit(main())
