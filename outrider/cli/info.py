"""``outrider info``: facts about the served models."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer
from rich.table import Table

from outrider.cli.facts import draft_length_text, placement_text, repetition_text
from outrider.cli.flag_groups import with_flag_groups
from outrider.cli.options import output
from outrider.cli.server_flags import ServerFlags
from outrider.generation import ModelInfo, ModelPlacement


@with_flag_groups
def info(
    *,
    server: ServerFlags,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the served models, their devices, limits and load."""
    with server.connect() as client:
        facts = client.model_info()
    if as_json:
        print(json.dumps(dataclasses.asdict(facts)))  # noqa: T201 - a console would fold it
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in info_lines(facts):
        table.add_row(name, value)
    output.print(table)


def info_lines(facts: ModelInfo) -> list[tuple[str, str]]:
    """(name, value) pairs for the terminal."""
    lines = [("target", facts.target_model), *_placed(facts.target_placement, facts.target_pages_free)]
    if facts.draft_model:
        lines.append(("draft", facts.draft_model + ("" if facts.draft_attached else ", not attached now")))
        lines += _placed(facts.draft_placement, facts.draft_pages_free)
        lines.append(("drafts", _drafts(facts)))
        lines += [("hidden states", line) for line in facts.tensor_planes]
    return [
        *lines,
        ("acceptance", facts.acceptance_method.value),
        ("output", repetition_text(facts.target_placement)),
        ("context", f"{facts.max_model_len:,} tokens, prompt and output together"),
        ("vocabulary", f"{facts.num_token_ids:,} tokens, ends of sequence {_ids(facts.eos_token_ids)}"),
        ("requests", f"{facts.num_running} running, {facts.num_waiting} waiting"),
        ("version", facts.version),
    ]


def _placed(placement: ModelPlacement, num_pages_free: int) -> list[tuple[str, str]]:
    where = placement_text(placement)
    free = num_pages_free * placement.page_size
    return [("", f"{where}, {free:,} free")] if where else []


def _drafts(facts: ModelInfo) -> str:
    most = draft_length_text(facts.num_speculative_tokens, facts.draft_length_mode)
    now = f"; {facts.draft_length:g} now" if facts.num_running else ""
    reason = f" ({facts.draft_length_reason})" if facts.draft_length_reason else ""
    return most + now + reason


def _ids(token_ids: tuple[int, ...]) -> str:
    return ", ".join(map(str, token_ids)) or "none"
