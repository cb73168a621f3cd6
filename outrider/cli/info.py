"""``outrider info``: what a server serves."""

from __future__ import annotations

import dataclasses

from rich.table import Table

from outrider.cli.options import DEFAULT_ADDRESS, Address, errors_as_lines, output
from outrider.client import Client


def info(*, address: Address = DEFAULT_ADDRESS) -> None:
    """Show what is served: models, limits, load."""
    with errors_as_lines(), Client(address) as client:
        facts = client.model_info()
    table = Table(show_header=False, box=None, pad_edge=False)
    for field in dataclasses.fields(facts):
        table.add_row(field.name, _text(getattr(facts, field.name)))
    output.print(table)


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(str(item) for item in value) or "none"
    return str(value) or "none"
