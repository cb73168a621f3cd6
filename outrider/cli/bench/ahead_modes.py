"""``outrider bench ahead-modes``: the modes of ``coordinator.draft_ahead`` in turn, on the same services."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.bench.harness import benchmark


def ahead_modes(
    out: Annotated[Path, typer.Argument(help="Folder of logs.")] = Path("ahead"),
    *,
    arm: Annotated[
        list[str],
        typer.Option(
            help="ARRANGEMENT:MODE:K:RULE, the last two optional, such as apart:chain:4; may be repeated."
            " Arrangements: apart, fp8, one, two."
        ),
    ],
    users: Annotated[list[int], typer.Option(min=1, help="Users at the same time; may be repeated.")],
    sampled_users: Annotated[
        list[int] | None, typer.Option(min=1, help="Those of arms with a RULE.", show_default="all")
    ] = None,
    foreseen: Annotated[
        float, typer.Option(help="Share of the draft's errors where its second choice is right.")
    ] = 0.0,
    setting: Annotated[list[str] | None, typer.Option(help="Further words of every coordinator.")] = None,
    output_len: Annotated[int, typer.Option(min=2, help="New tokens of a request.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, each of which plays every arm once.")] = 6,
    limit_s: Annotated[float, typer.Option(help="Seconds after which no round begins.")] = 200.0,
    start_s: Annotated[float, typer.Option(help="Seconds within which the services start.")] = 120.0,
    tiny: Annotated[bool, typer.Option(help="Tiny models on a CPU.")] = False,
) -> None:
    """Measure modes of drafting ahead in turn on the same services: a synthetic pair of the shapes 8B and 1B."""
    benchmark("figures.draft_ahead").run(
        out, arm, users=users, sampled_users=sampled_users, foreseen=foreseen, settings=setting or [],
        output_len=output_len, rounds=rounds, start_s=start_s, limit_s=limit_s, is_tiny=tiny,
    )  # fmt: skip
