"""Commands: their help pages and their errors.

Help is plain text in groups, in which a flag's name is never cut, however narrow the terminal. An error is one line,
which names the flag that was typed.
"""

from __future__ import annotations

import re
from typing import Any

from typer.core import TyperCommand, TyperGroup

from outrider.cli.options import errors_as_lines
from outrider.cli.typed import named_as_typed, note_typed, values_as_typed

_TYPES = {"str": "TEXT", "int": "INTEGER", "float": "FLOAT", "Path": "PATH"}
_SHOWN_TYPE = re.compile(r"<(?:list\[)?(\w+)\]?>")
"""A type as newer versions of typer show it; older ones write TEXT themselves."""


class GroupedCommand(TyperCommand):
    """A command whose help has one section for each ``rich_help_panel``, and ``Options`` last; its errors are lines."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - of a library typer brings itself
        """Parse, and keep the flags as they were typed, for errors."""
        note_typed(ctx, args)
        with values_as_typed(ctx, tuple(args)):  # the parser takes the words out of the list
            return list(super().parse_args(ctx, args))

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401
        """Run the command; an ``OutriderError`` is one line and exit code 1."""
        with errors_as_lines(), named_as_typed(ctx):
            return super().invoke(ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401
        """Write each flag on a line of its own; a long one has its text on the next."""
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        ungrouped: list[tuple[str, str]] = []
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None:
                continue
            panel = getattr(param, "rich_help_panel", None)
            if param.param_type_name == "argument":
                rows = groups["Arguments"]
            else:
                rows = groups.setdefault(panel, []) if panel else ungrouped
            rows.append((_SHOWN_TYPE.sub(_type, record[0]), record[1]))
        for title, rows in [*groups.items(), ("Options", ungrouped)]:
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


class CommandGroup(TyperGroup):
    """Commands whose list shows the whole first paragraph of each, wrapped."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401
        """Write the commands in the order in which they were added."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, _first_paragraph(each.help)) for name, each in commands if each is not None and not each.hidden]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _first_paragraph(text: str | None) -> str:
    return " ".join((text or "").strip().partition("\n\n")[0].split())


def _type(shown: re.Match[str]) -> str:
    return _TYPES.get(shown[1], shown[1].upper())
