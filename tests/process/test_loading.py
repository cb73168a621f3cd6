"""The watch over loading: what counts as progress, and a process whose loading hangs."""

from __future__ import annotations

import asyncio
import subprocess
import sys

from outrider.cli.stack.held_ports import hold_port
from outrider.process.loading import LOADING_FACTOR, LoadingWatch
from outrider.stalls import NO_STALL

DEADLINE_S = 240.0
HANGING_LOAD = """
import asyncio, sys, threading
from outrider.config import DraftSettings
from outrider.process import loading, watchdog
from outrider.process.hosting import host_service
from outrider.transport.server import serve_draft

loading.LOADING_FACTOR, watchdog.LOOK_INTERVAL_S = 0.01, 0.05

def a_device_that_hangs(progress, on_failure):
    progress.on_files()
    progress.weights(1, 4)
    threading.Event().wait()

async def listen(pending):
    return await serve_draft(pending, host="127.0.0.1", port=int(sys.argv[1]))

settings = DraftSettings.model_validate({"method": "ngram", "hang_timeout_s": 50.0})
asyncio.run(host_service(listen, a_device_that_hangs, settings))
"""


async def test_only_bytes_and_graphs_are_progress_once_the_files_are_there() -> None:
    seen: list[tuple[int, int]] = []
    watch = LoadingWatch(asyncio.get_running_loop(), timeout_s=10.0)
    load = watch.watched(lambda done, total: seen.append((done, total)))
    assert (watch.stall, watch.stall) == (NO_STALL, NO_STALL), "a download takes as long as it takes"
    watch.note()
    assert watch.stall.age_s == 0.0
    assert watch.stall.age_s > 0.0
    assert watch.stall.limit_s == 10.0 * LOADING_FACTOR
    load(5, 9)
    assert watch.stall.age_s == 0.0
    assert seen == [(5, 9)]


def test_a_process_whose_loading_hangs_ends_with_its_stacks() -> None:
    command = [sys.executable, "-c", HANGING_LOAD, str(hold_port())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 1
    assert "loading has made no progress" in done.stderr
    assert "a_device_that_hangs" in done.stderr
