"""Makes docs/configuration.md from the settings' schema, and the list by which the chart knows a setting that is
misspelt; with --check only says whether they are up to date.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from outrider.config.client import CLIENT_VARIABLES
from outrider.config.reference import SettingRow, setting_rows
from outrider.config.schema import SECTIONS, TargetSettings
from outrider.config.schema.model_service import ModelServiceSettings
from outrider.config.speculative import KEYS
from outrider.config.typed_names import RENAMED

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
and where its value comes from.

`outrider serve` completes what is not set: the draft and target services get the coordinator's `max_running_requests`
and `num_speculative_tokens`, room for twice as many sessions, and free ports, of which `coordinator.target_address` and
`coordinator.draft_address` are made. The gateway gets the coordinator's host, tokens and certificates unless it has its
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


SHARED = """\
Settings of both model services. Each has its own value: `target.page_size` and `draft.page_size` may differ. Flags
`--key` of `outrider target` and `outrider draft`, variables """

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
        + section_text("target")
        + section_text("draft")
        + shared_text()
        + section_text("coordinator")
        + section_text("gateway")
        + SPECULATIVE
        + speculative_rows()
        + CLIENT
        + client_rows()
    )


def chart_text() -> str:
    """Every section's keys, with the former names that are still taken."""
    keys = {name: [row.key for row in setting_rows(section)] for name, section in SECTIONS.items()}
    keys = {name: sorted([*own, *(old for old in RENAMED if RENAMED[old] in own)]) for name, own in keys.items()}
    return json.dumps(keys, indent=1) + "\n"


def section_text(name: str) -> str:
    """Table of the settings of one section; of a model service, those that the other one has too are left out."""
    section = SECTIONS[name]
    rows, more = setting_rows(section), ""
    if issubclass(section, ModelServiceSettings):
        rows = [row for row in rows if row.key not in ModelServiceSettings.model_fields]
        more = " Its other settings are those of [both model services](#target-and-draft)."
    about = (section.__doc__ or "").replace("``", "`")
    return f"\n## `{name}`\n\n{about} Flags `--key`, variables `{_prefix(name)}KEY`.{more}\n\n{_table(rows)}"


def shared_text() -> str:
    """Table of the settings that both model services have, each with a value of its own."""
    rows = [row for row in setting_rows(TargetSettings) if row.key in ModelServiceSettings.model_fields]
    names = [name for name, section in SECTIONS.items() if issubclass(section, ModelServiceSettings)]
    variables = " and ".join(f"`{_prefix(name)}KEY`" for name in names)
    return f"\n## {' and '.join(f'`{name}`' for name in names)}\n\n{SHARED}{variables}.\n\n{_table(rows)}"


def _prefix(name: str) -> str:
    return f"OUTRIDER_{name.upper()}_"


def _table(rows: list[SettingRow]) -> str:
    lines = [f"| `{row.key}` | {row.default} | {row.description} |\n" for row in rows]
    return "| key | default | meaning |\n|---|---|---|\n" + "".join(lines)


def speculative_rows() -> str:
    """The keys of vLLM."""
    rows = [f"| `{key}` | `{'.'.join(place)}` |" for key, place in KEYS.items()]
    return "\n".join(rows) + "\n"


def client_rows() -> str:
    """Variables that callers read."""
    return "".join(f"| `{name}` | {meaning} |\n" for name, meaning in CLIENT_VARIABLES.items())


if __name__ == "__main__":
    sys.exit(main())
