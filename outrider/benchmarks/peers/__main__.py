"""A peer's own process: a job as JSON on standard input, its tokens and times as one line on standard output.

Owns that line: whatever the engine and its processes print goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from outrider.benchmarks.peers.engines import ENGINES, NEEDS, Generate, Pair


def main() -> None:
    """Load once, then for each number of users warm up and time its groups of prompts: one new token, and all."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answer:
        os.dup2(2, 1)
        job = json.load(sys.stdin)
        generate = ENGINES[job["engine"]](Pair(**job["pair"]))
        loads = [list(_timed(generate, groups, job["num_tokens"], job["num_warmups"])) for groups in job["loads"]]
        version = getattr(sys.modules.get(NEEDS[job["engine"]]), "__version__", "")
        answer.write("\n" + json.dumps({"engine": job["engine"], "version": version, "loads": loads}) + "\n")


def _timed(
    generate: Generate, groups: Sequence[Sequence[Sequence[int]]], num_tokens: int, num_warmups: int
) -> Iterable[dict[str, Any]]:
    for _ in range(num_warmups):
        for count in (1, num_tokens):
            generate(groups[0], count)
    for group in groups:
        began = time.perf_counter()
        generate(group, 1)
        first = time.perf_counter()
        found = generate(group, num_tokens)
        ended = time.perf_counter()
        streams_s = None if found.streams_s is None else fmean(found.streams_s)
        yield {"tokens": found.tokens, "first_s": first - began, "whole_s": ended - first, "streams_s": streams_s}


if __name__ == "__main__":
    main()
