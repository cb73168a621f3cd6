"""A peer's own process: a job as JSON on standard input, its tokens and times as the last line of standard output."""

from __future__ import annotations

import json
import sys
import time

from outrider.benchmarks.peers.engines import ENGINES, Pair


def main() -> None:
    """Load, warm up with the first prompt, then time every prompt: one new token, and all of them."""
    job = json.load(sys.stdin)
    generate = ENGINES[job["engine"]](Pair(**job["pair"]))
    num_tokens = job["num_tokens"]
    for _ in range(job["num_warmups"]):
        generate(job["prompts"][0], num_tokens)
    answers = []
    for prompt in job["prompts"]:
        began = time.perf_counter()
        generate(prompt, 1)
        first = time.perf_counter()
        tokens = generate(prompt, num_tokens)
        ended = time.perf_counter()
        answers.append({"tokens": tokens, "first_s": first - began, "whole_s": ended - first})
    sys.stdout.write("\n" + json.dumps(answers) + "\n")


if __name__ == "__main__":
    main()
