"""``outrider coordinator | target | draft | gateway``: one service in this process, with the flags of its own section.

The service's package reads its flags (``--help`` lists them); the command line imports no service.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from outrider.cli.options import errors_as_lines
from outrider.config import service_module
from outrider.process.extras import require_extras

_HELP = {
    "coordinator": "Start a coordinator only; targets and drafts run elsewhere.",
    "target": "Start a target service only.",
    "draft": "Start a draft service only.",
    "gateway": "Start an HTTP gateway only: the OpenAI-compatible API for coordinators (--coordinator ADDRESS...).",
}

_EXTRAS = {"coordinator": "coordinator", "target": "engine", "draft": "engine", "gateway": "gateway"}


def _starting(section: str) -> Callable[[list[str] | None], None]:
    def start(flags: Annotated[list[str] | None, typer.Argument(metavar="[FLAGS]...")] = None) -> None:
        with errors_as_lines():
            require_extras([_EXTRAS[section]], f"the {section} service")
        sys.argv = [f"outrider {section}", *(flags or ())]
        runpy.run_module(service_module(section), run_name="__main__", alter_sys=True)

    start.__doc__ = _HELP[section]
    return start


SERVICES = {section: _starting(section) for section in _HELP}
"""Commands by name."""
