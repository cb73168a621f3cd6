"""Busy polling of one CPU: `python spinner.py PROCESSOR`, told through its standard input.

Each byte read keeps it busy for ``LINGER_S`` more; without any it sleeps, and it ends with its input, so it never
outlives who started it. It yields to everything else on the processor. Standard library only, and no package: it is
started by its path, to be small.
"""

from __future__ import annotations

import os
import signal
import sys
import time

LINGER_S = 0.2
"""Time of polling after the last byte, longer than the gap between two steps."""
_ROUNDS = 5_000


def main(processor: int, wake_fd: int = 0) -> None:
    """Spin until the file descriptor ``told`` ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's goes to all; the end of the input is what counts
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    os.sched_setaffinity(0, {processor})
    until = 0.0
    while True:
        os.set_blocking(wake_fd, time.monotonic() >= until)
        try:
            if not os.read(wake_fd, 4096):
                return
            until = time.monotonic() + LINGER_S
        except BlockingIOError:
            pass
        for _ in range(_ROUNDS):
            pass


if __name__ == "__main__":
    main(int(sys.argv[1]))
