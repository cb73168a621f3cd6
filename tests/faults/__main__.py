"""``python -m tests.faults``, by name ``make soak``: the long form of the fault suite.

Plays scenarios one after another, each on a stack of its own; prints what happens and one table; writes the figures to
a JSON file, which keeps what it holds of other scenarios. Exit code 1 when a figure misses its bound.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop

from outrider.generation import GenerationResult
from tests.faults.report import Result, table, write
from tests.faults.run import prepared
from tests.faults.scenarios.table import SCENARIOS, Scenario
from tests.faults.stack import Layout

_LIMIT_S = 3 * 3600
"""Time limit of a scenario."""
_SHOWN_PROBLEMS, _SHOWN_CHARACTERS = 10, 1500


def main() -> None:
    """Play what the arguments name."""
    options = _arguments()
    say(f"seed {options.seed}, scale {options.scale:g}: {', '.join(options.scenarios)}")
    held: dict[str, Any] = {}
    all_pass, twins = True, dict[int, GenerationResult]()
    for name in options.scenarios:
        result = uvloop.run(
            play(_scenario(name, options.draft_ahead), options.seed, options.scale, options.logs, twins)
        )
        for problem in result.problems[:_SHOWN_PROBLEMS]:
            say(f"{name}: {problem[:_SHOWN_CHARACTERS]}")
        all_pass &= result.passes
        held = write(options.output, result)
    sys.stdout.write(f"{table(held)}\n")
    sys.exit(0 if all_pass else 1)


async def play(
    scenario: Scenario, seed: int, scale: float, logs: Path | None, twins: dict[int, GenerationResult]
) -> Result:
    """One scenario on a stack of its own; what makes it break off is a problem of its result.

    ``twins`` are those of this seed, made here where there are none yet.
    """
    count = max(1, round(scenario.count * scale))
    folder = None if logs is None else logs / scenario.name
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    say(f"{scenario.name}: seed {seed}, {count} {scenario.counted}")
    began, result = time.monotonic(), Result(scenario.name, seed, scale)
    try:
        async with (
            asyncio.timeout(_LIMIT_S),
            scenario.stack(folder) as stack,
            prepared(stack, seed=seed, say=say, twins=twins) as shared,
        ):
            run = shared.run(stack, scenario.name, seed=seed, count=count, scale=scale, say=say)
            result = run.result
            twins.update(shared.twins)
            await scenario.play(run)
    except (Exception, ExceptionGroup) as error:
        result.problems.append(f"broke off: {''.join(traceback.format_exception(error))}")
        result.add("broke off", 1, 0)
    result.seconds = time.monotonic() - began
    return result


def _scenario(name: str, draft_ahead: str | None) -> Scenario:
    """Scenario of that name, its coordinators with another ``draft_ahead``."""
    found = SCENARIOS[name]
    if draft_ahead is None or not isinstance(found.layout, Layout):
        return found
    layout = replace(found.layout, coordinator={**found.layout.coordinator, "draft_ahead": draft_ahead})
    return replace(found, layout=layout)


def say(text: str) -> None:
    """Print a line with the time."""
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stdout.flush()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=f"of {', '.join(SCENARIOS)}; none: all")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32), help="random when unset")
    parser.add_argument("--scale", type=float, default=1.0, help="of every count; 1 are the figures to reach")
    parser.add_argument("--draft-ahead", help="of all coordinators but those of `outrider serve`")
    parser.add_argument("--output", type=Path, default=Path("build/soak.json"))
    parser.add_argument("--logs", type=Path, help="folder that keeps the logs of all processes")
    options = parser.parse_args()
    options.scenarios = options.scenarios or list(SCENARIOS)
    if unknown := set(options.scenarios) - set(SCENARIOS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(SCENARIOS)}")
    return options


if __name__ == "__main__":
    main()
