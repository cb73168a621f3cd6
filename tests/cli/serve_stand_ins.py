"""``outrider serve`` with services that need no model.

python -m tests.cli.serve_stand_ins VERBOSITY NOTES [ARGUMENTS OF THE SERVICES...]
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from outrider.cli.stack.plan import StackPlan
from outrider.cli.stack.process import ChildProcess
from outrider.cli.stack.running import Described, run_until_signal
from outrider.telemetry import guard_output
from tests.cli.fake_service import note
from tests.cli.test_stack import plan


def main() -> None:
    guard_output()
    verbose, notes, *arguments = sys.argv[1:]

    has_bug = "--bug" in arguments
    if has_bug:
        arguments.remove("--bug")

    def say_ready(plan: StackPlan, described: Described) -> None:
        if has_bug:
            ChildProcess.start = broken  # type: ignore[method-assign, assignment]
        print("ready")  # noqa: T201
        note(Path(notes), "ready")

    asyncio.run(run_until_signal(plan("--log", notes, *arguments), verbose=int(verbose), on_ready=say_ready))


async def broken(*_: object) -> None:
    raise ValueError("a bug")


if __name__ == "__main__":
    main()
