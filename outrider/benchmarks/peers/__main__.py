"""A peer's own process: a job as JSON on standard input, its tokens and times as the last line of standard output."""

from __future__ import annotations

import json
import sys
import time

from outrider.benchmarks.peers.engines import ENGINES, Pair


def main() -> None:
    """Load, warm up, then time the prompts, as many at a time as there are users: one new token, and all of them."""
    job = json.load(sys.stdin)
    pair = Pair(**job["pair"])
    generate = ENGINES[job["engine"]](pair)
    num_tokens = job["num_tokens"]
    groups = [job["prompts"][start : start + pair.num_users] for start in range(0, len(job["prompts"]), pair.num_users)]
    for _ in range(job["num_warmups"]):
        generate(groups[0], num_tokens)
    answers = []
    for group in groups:
        began = time.perf_counter()
        generate(group, 1)
        first = time.perf_counter()
        tokens = generate(group, num_tokens)
        ended = time.perf_counter()
        answers.append({"tokens": tokens, "first_s": first - began, "whole_s": ended - first})
    sys.stdout.write("\n" + json.dumps(answers) + "\n")


if __name__ == "__main__":
    main()
