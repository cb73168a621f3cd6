"""Chats rendered in processes of their own, off the event loop and within limits of time, memory and output."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import IO

from outrider.chat import ChatPrompt
from outrider.errors import InvalidRequestError, UnavailableError
from outrider.limits import PROMPT_CHARACTERS
from outrider.tokenization.chat.renderer import ChatRenderer
from outrider.tokenization.chat.rendering_process import ANSWER, INVALID, LENGTH, MEMORY_BYTES, PROCESSOR_S

_NUM_PROCESSES = 2
"""One chat that takes long leaves the other process to other users."""
_PATIENCE_S = 20.0
"""Wall-clock time of one chat, on a machine that gives the process hardly any processor time."""
_MOST_BYTES = 4 * PROMPT_CHARACTERS.most
MAIN = "import sys; sys.path[:] = {path!r}; from outrider.tokenization.chat.rendering_process import main; main()"
_ENVIRONMENT = ("PATH", "TZ", "TZDIR", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONHOME")
"""Variables that the process gets; others may be secrets."""


class _EndedError(Exception):
    """The process has ended, or was ended; the message says why."""


class ChatRendering:
    """Renders the chats of one model in processes, which are started when they are first needed."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self._threads: ThreadPoolExecutor | None = None
        self._idle: deque[_Process] = deque()

    async def render(self, chat: ChatPrompt) -> str:
        """The prompt of a chat; ``InvalidRequestError`` names what cannot be rendered, or the template that takes too
        long.
        """
        self._renderer.check_template(chat)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_NUM_PROCESSES, thread_name_prefix="chat-template")
        turn = _Rendering()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._render, chat, turn)
        except asyncio.CancelledError:
            turn.give_up()
            raise

    def _render(self, chat: ChatPrompt, turn: _Rendering) -> str:
        process = self._idle.pop() if self._idle else _Process(pickle.dumps(self._renderer.templates))
        try:
            with turn.of(process):
                kind, text = process.ask(pickle.dumps(chat.plain()))
        except _EndedError as error:
            process.end()
            name = self._renderer.name_of_template(chat)
            raise InvalidRequestError("messages", f"cannot be rendered by the chat template {name}: {error}") from None
        except BaseException:
            process.end()
            raise
        self._idle.append(process)
        if kind == INVALID:
            raise InvalidRequestError(*text.split("\n", 1))
        return text


class _Rendering:
    """One chat that a process renders; it ends with the process when its client is gone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._is_over = False

    @contextlib.contextmanager
    def of(self, process: _Process) -> Iterator[None]:
        """Result of the process that renders the chat; ``_EndedError`` if no caller waits for it."""
        with self._lock:
            if self._is_over:
                raise _EndedError("its client is gone")
            self._process = process
        try:
            yield
        finally:
            with self._lock:
                self._process = None

    def give_up(self) -> None:
        """End the process if it renders the chat; thread-safe."""
        with self._lock:
            self._is_over = True
            if self._process is not None:
                self._process.kill()


class _Process:
    """One process; asked for one chat at a time."""

    def __init__(self, templates: bytes) -> None:
        """``UnavailableError`` if the system has no room for it."""
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", MAIN.format(path=sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                bufsize=0,
            )
        except OSError as error:
            raise UnavailableError(f"chat templates cannot be rendered now: {error}") from error
        weakref.finalize(self, _end, self._process)
        self._send(templates)

    def ask(self, chat: bytes) -> tuple[bytes, str]:
        """The kind and the text of the answer; ``_EndedError`` if the process ends, or answers too late or too much."""
        until = time.monotonic() + _PATIENCE_S
        self._send(chat)
        kind, length = ANSWER.unpack(self._receive(ANSWER.size, until))
        if length > _MOST_BYTES:
            raise _EndedError(f"it gives more than {_MOST_BYTES} bytes")
        return kind, self._receive(length, until).decode("utf-8", "replace")

    def kill(self) -> None:
        """Kill it; ``ask`` then ends in its own thread."""
        self._process.kill()

    def end(self) -> None:
        """Kill it and close its pipes; idempotent."""
        _end(self._process)

    def _send(self, content: bytes) -> None:
        view = memoryview(LENGTH.pack(len(content)) + content)
        with contextlib.suppress(OSError):  # it has ended, which reading its answer tells
            while view:
                view = view[os.write(_descriptor(self._process.stdin), view) :]

    def _receive(self, size: int, until: float) -> bytes:
        found = bytearray()
        output, poller = _descriptor(self._process.stdout), select.poll()
        poller.register(output, select.POLLIN)
        while len(found) < size:
            if not poller.poll(max(0, round(1000 * (until - time.monotonic())))):
                raise _EndedError(f"it takes more than {_PATIENCE_S:g} s")
            content = os.read(output, min(size - len(found), 1 << 20))
            if not content:
                raise _EndedError(_cause(self._process.wait()))
            found += content
        return bytes(found)


def _descriptor(pipe: IO[bytes] | None) -> int:
    if pipe is None:
        raise UnavailableError("chat templates cannot be rendered: their process has no pipe")
    return pipe.fileno()


def _cause(code: int) -> str:
    """Cause of the end of a process that was to answer."""
    if code == -signal.SIGPROF:
        return f"it takes more than {PROCESSOR_S:g} s of processor time"
    return f"its process ended with code {code}; it may take more than {MEMORY_BYTES >> 20} MiB of memory"


def _end(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    process.kill()
    process.wait()
