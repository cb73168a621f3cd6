"""Batch-invariant products whose loop has a single step, as the compiler leaves them; prints what the steps begin with.

Added to something else in plain words, such a product would begin with it, and sum columns in another order than a
kernel that adds afterwards. Run as a module, in a process in which Triton does not interpret.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from outrider.kernels.linear.ordered import _ordered_kernel
from tests.kernels.compiling import CONSTANTS, compile_kernel

CASES: list[dict[str, Any]] = [
    {"K": 320, "PARTS": 4, "HAS_BIAS": False, "FETCHED": 0},  # the third part has one step
    {"K": 64, "PARTS": 1, "IS_GATED": True, "HAS_BIAS": True, "FETCHED": 0},
]


def beginnings(code: str) -> set[str]:
    """Operations that give the products' accumulators."""
    found = set()
    for name in re.findall(r"tt\.dot %\w+, %\w+, (%\w+)", code):
        carried = re.search(rf"iter_args\([^)]*{name} = (%\w+)", code)
        first = carried[1] if carried else name
        defined = re.search(rf"{first} = ([\w.]+)", code)
        found.add(defined[1] if defined else first)
    return found


if __name__ == "__main__":
    for constants in CASES:
        begun = beginnings(compile_kernel(_ordered_kernel, CONSTANTS[_ordered_kernel] | constants, 90, "ttir"))
        sys.stdout.write(" ".join(sorted(begun)) + "\n")
