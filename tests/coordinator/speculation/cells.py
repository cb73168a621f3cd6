"""Judge of the controller: goodput over plain decoding in the cells of the decision on draft lengths, and in loads.

    python -m tests.coordinator.speculation.cells --save before.json
    python -m tests.coordinator.speculation.cells --against before.json

``held out``: no constant was chosen by these pairs, users and acceptances. Each row is a mean over seeds, and over both
ways in which a profile is wrong. ``--against`` lists the rows that differ by 3% or more.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import fmean

from outrider_coordinator.speculation import DraftLengthController
from tests.coordinator.speculation.served_arrivals import ServedArrivals
from tests.coordinator.speculation.served_bursts import Served
from tests.coordinator.speculation.simulated_crowd import Crowd, TakingTurns
from tests.coordinator.speculation.simulated_load import Bursts, Load, expected_rate, profile_of
from tests.coordinator.speculation.test_bursts import PAIRS, WRONG

Row = tuple[str, str, int, float]
"""Kind, pair, users, acceptance."""
_CELLS: dict[str, tuple[int, tuple[str, ...], tuple[int, ...], tuple[float, ...]]] = {
    "held out": (3, ("measured head", "two cards", "busy", "slow links", "cpu"), (2, 12, 40), (0.4, 0.65, 0.85)),
    "tuned": (1, ("h200", "h100", "slow host", "head", "measured", "few"), (1, 8, 32), (0.3, 0.6, 0.81, 0.92)),
    "alternating": (2, ("h100", "two cards", "measured"), (4, 32), (0.5, 0.81, 0.92)),
    "arrivals": (2, ("h100", "two cards", "measured"), (4, 32), (0.5, 0.81, 0.92)),
    "long prompts": (2, ("h100", "two cards", "measured"), (4, 32), (0.5, 0.81, 0.92)),
    "2 coordinators": (2, ("h200", "h100"), (8, 32), (0.5, 0.8)),
    "4 in turn": (2, ("h200", "h100"), (8, 32), (0.5, 0.8)),
}
"""Seeds, pairs, users and acceptances of each kind."""
_NUM_BURSTS = 4


def rows() -> list[Row]:
    """All rows."""
    return [
        (kind, *each)
        for kind, (_, pairs, users, acceptances) in _CELLS.items()
        for each in itertools.product(pairs, users, acceptances)
    ]


def ratios(row: Row, seed: int) -> dict[str, float]:
    """Throughput over plain decoding, of the first burst and of later ones; of a whole load as if of later ones."""
    kind, name, num_users, acceptance = row
    pair = PAIRS[name]
    if kind in ("held out", "tuned"):
        return _of_bursts(row, seed)
    if kind == "alternating":
        times: list[list[float]] = []
        for length in (0, None):
            served = Served(pair, acceptance, seed=seed, length=length)
            times.append([])
            for _ in range(_NUM_BURSTS):
                served.burst(num_users, num_tokens=1)
                times[-1].append(served.burst(num_users, num_tokens=257))
        return _split([plain / chosen for plain, chosen in zip(*times, strict=True)])
    if kind in ("arrivals", "long prompts"):
        num_prompt_tokens = 128 if kind == "arrivals" else 2000
        plain, chosen = (
            ServedArrivals(pair, acceptance, seed=seed, length=length, num_prompt_tokens=num_prompt_tokens).serve(
                num_users, 8.0
            )
            for length in (0, None)
        )
        return {"later": chosen / plain}
    crowd = (Crowd if kind == "2 coordinators" else TakingTurns)(
        Load(pair, lambda now, number: acceptance, seed=seed), int(kind[0])
    )
    return {"later": crowd.run(num_users, 8.0).rate() / expected_rate(pair, num_users, 0, acceptance)}


def _of_bursts(row: Row, seed: int) -> dict[str, float]:
    _, name, num_users, acceptance = row
    found = []
    for biases in (None, *WRONG.values()):
        controller = DraftLengthController(profile_of(PAIRS[name], *biases)) if biases else None
        load = Load(PAIRS[name], lambda now, number: acceptance, seed=seed)
        bursts = Bursts(load, max_length=8 if biases else 0, controller=controller)
        bursts.num_tokens = 192
        found.append([bursts.burst(num_users) for _ in range(_NUM_BURSTS)])
    plain_s, *chosen = found
    each = [_split([fmean(plain_s) / seconds for seconds in own]) for own in chosen]
    return {key: fmean(one[key] for one in each) for key in each[0]}


def _split(found: list[float]) -> dict[str, float]:
    return {"first": found[0], "later": fmean(found[1:])}


def measure() -> dict[str, dict[str, float]]:
    """Mean over seeds of each row, by its name."""
    every = rows()
    with ProcessPoolExecutor(2) as pool:
        jobs = [[pool.submit(ratios, row, seed) for seed in range(_CELLS[row[0]][0])] for row in every]
        found = [[job.result() for job in own] for own in jobs]
    return {
        " ".join(map(str, row)): {key: fmean(one[key] for one in own) for key in own[0]}
        for row, own in zip(every, found, strict=True)
    }


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def main() -> None:
    """Print mean and worst by kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--against", type=Path)
    options = parser.parse_args()
    found = measure()
    kinds: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for (kind, *_), own in zip(rows(), found.values(), strict=True):
        for key, value in own.items():
            kinds[kind, key].append(value)
    for (kind, key), values in kinds.items():
        _say(f"{kind:<15} {key:<6} {len(values):>3} rows  mean {fmean(values):.3f}  worst {min(values):.3f}")
    if options.save:
        options.save.write_text(json.dumps(found, indent=1), encoding="utf-8")
    if options.against:
        before = json.loads(options.against.read_text(encoding="utf-8"))
        for name, own in found.items():
            for key, value in own.items():
                if abs(value / before[name][key] - 1.0) >= 0.03:
                    _say(f"{name:<35} {key:<6} {before[name][key]:.3f} -> {value:.3f}")


if __name__ == "__main__":
    main()
