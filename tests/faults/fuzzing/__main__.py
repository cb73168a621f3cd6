"""Runs a campaign; writes a line of JSON now and then, and at the end one with everything."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import asdict

import uvloop

from tests.faults.fuzzing.campaign import Campaign

_EVERY_S = 5.0


def main() -> None:
    """Arguments of the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.fuzzing")
    for role in ("coordinator", "target", "draft"):
        parser.add_argument(f"--{role}", required=True, metavar="ADDRESS")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    options = parser.parse_args()
    addresses = {role: getattr(options, role) for role in ("coordinator", "target", "draft")}
    uvloop.run(_run(Campaign(addresses, options.seed, options.count)))


async def _run(campaign: Campaign) -> None:
    running = asyncio.create_task(campaign.run())
    while not running.done():
        await asyncio.wait([running], timeout=_EVERY_S)
        outcome = campaign.outcome
        _write({"messages": outcome.num_messages, "findings": len(outcome.findings)})
    await running
    _write({"outcome": asdict(campaign.outcome)})


def _write(record: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
