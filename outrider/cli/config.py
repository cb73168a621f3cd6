"""``outrider config``: every setting, its value and the source of the value."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from outrider.cli.options import output
from outrider.cli.serve_settings import flag_names
from outrider.cli.settings_flags import ConfigFile, SetOptions, SpeculativeConfig, parse_set
from outrider.cli.typed import Typed, typed_flags
from outrider.config import UNSET, Effective, load_all
from outrider.config.reference import effective_rows
from outrider.config.sources import variable_name
from outrider.errors import ConfigError

_MODEL = ("target", "model")
_WIDEST = 10_000
"""Line width in characters that no setting reaches, so that nothing is wrapped."""


def config(
    context: typer.Context,
    *,
    speculative_config: SpeculativeConfig = None,
    config: ConfigFile = None,
    set_options: SetOptions = None,
    changed: Annotated[bool, typer.Option("--changed", help="Only settings that are not at their default.")] = False,
) -> None:
    """Show every setting and the source of its value; `outrider serve` completes some that are not set."""
    rows = effective_rows(_load(typed_flags(context), speculative_config, config, set_options))
    table = Table("setting", "value", "from", "variable", box=None, pad_edge=False)
    for row in rows:
        if not changed or row.origin != "default":
            origin = "argument of serve" if row.value == UNSET else row.origin
            table.add_row(row.name, row.value, origin, variable_name(*row.name.split(".", 1)))
    # As wide as it needs to be: a name that is cut off cannot be copied.
    unbounded = output.options.update(max_width=_WIDEST)
    Console(highlight=False, emoji=False, width=output.measure(table, options=unbounded).maximum).print(table)


def _load(typed: Typed, speculative_config: str | None, config: str | None, set_options: list[str] | None) -> Effective:
    flags = parse_set(set_options)
    names = flag_names({}, typed, flags)
    try:
        return load_all(flags, speculative_config=speculative_config, config=config, flag_names=names)
    except ConfigError as error:
        # The one setting without a default is usually given as an argument of `serve`.
        if error.problem != UNSET:
            raise
        flags[_MODEL] = UNSET
        return load_all(flags, speculative_config=speculative_config, config=config, flag_names=names)
