"""Hook that lets a process hang, loaded by every Python process that has this folder on its PYTHONPATH.

SIGUSR1 stops for good what the process is for, while everything else goes on: the compute thread of a service, the
steps of a rank, the event loop of any other process. SIGUSR2 stops the main thread with the interpreter lock held, as a
driver call that never returns.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading

_FOR_GOOD_S = 1_000_000
_COMPUTING = (
    ("outrider.serving.engine_core", "EngineCore", "step"),
    ("outrider.model_executor.worker", "Worker", "run"),
)
"""The first that is there: a rank that follows has no engine."""


def _wait(*_: object, **__: object) -> None:
    threading.Event().wait()


def _hang(*_: object) -> None:
    for module, kind, method in _COMPUTING:
        if module in sys.modules:
            setattr(getattr(sys.modules[module], kind), method, _wait)
            return
    _wait()


def _hang_with_lock(*_: object) -> None:
    ctypes.PyDLL(None).sleep(_FOR_GOOD_S)


signal.signal(signal.SIGUSR1, _hang)
signal.signal(signal.SIGUSR2, _hang_with_lock)
