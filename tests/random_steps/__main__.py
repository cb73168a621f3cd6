"""``python -m tests.random_steps --device cuda --num-steps 10000``; ``scripts/sanitize.sh`` under compute-sanitizer."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.random_steps.test_random_steps import take_random_steps
from tests.support.tiny_models import build_tiny_model


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.random_steps", description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--num-steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = build_tiny_model(Path(folder) / "model")
        take_random_steps(
            model,
            options.device,
            options.num_steps,
            seed=options.seed,
            say=lambda text: print(text, flush=True),  # noqa: T201
        )
    sys.stdout.write("nothing was wrong\n")


if __name__ == "__main__":
    main()
