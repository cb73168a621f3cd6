"""Runs inside each child process: ties its life to its parent's, then becomes the service.

    python -m outrider.cli.stack.child PARENT_PID MODULE [ARGUMENTS...]

Two ties, since a parent may be killed without a chance to say so: on Linux the kernel kills the child when its parent
ends, and everywhere a thread waits for the end of standard input, whose other end only the parent holds.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    """Tie the process to its parent and run the module as ``__main__``."""
    parent, module, *arguments = argv
    _die_with_parent(int(parent))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _die_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have ended before the kernel was asked.
    if os.getppid() != parent:
        os._exit(1)
    lifeline = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    threading.Thread(target=_end_with, args=(lifeline,), name="lifeline", daemon=True).start()


def _end_with(lifeline: int) -> None:
    while os.read(lifeline, 1):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
