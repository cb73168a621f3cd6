"""Process that renders chats, with limits on its processor time and its memory.

A chat template is code of the model's author. A loop in it cannot be ended from within the interpreter, so the kernel
ends this process: by SIGPROF when a chat takes too much processor time. Knows no environment of its parent's, and no
files but its two pipes.

Input: a pickled ``ChatTemplates``, then pickled ``ChatPrompt``s, each after its length. Output: for each chat a kind,
a length and a text: the prompt, or the field at fault and what is wrong with it.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
import struct
import sys
from typing import BinaryIO

from outrider.chat import ChatPrompt
from outrider.errors import InvalidRequestError
from outrider.tokenization.chat.renderer import ChatRenderer

PROCESSOR_S = 2.0
"""Processor time of one chat; the longest chats that are taken need a few tenths of it."""
MEMORY_BYTES = 512 << 20
"""Address space of the process: a template of a user cannot take the host's memory."""
NICENESS = 10
"""Chats that take long leave the processors to what serves other users."""
LENGTH = struct.Struct("!I")
ANSWER = struct.Struct("!cI")
PROMPT, INVALID = b"P", b"I"


def main() -> None:
    """Render until the input ends."""
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    templates = read(source)
    if templates is None:
        return
    renderer = ChatRenderer(pickle.loads(templates))  # written by the parent
    while (content := read(source)) is not None:
        kind, text = _answer(renderer, pickle.loads(content))
        encoded = text.encode("utf-8", "replace")
        sink.write(ANSWER.pack(kind, len(encoded)) + encoded)
        sink.flush()


def _answer(renderer: ChatRenderer, chat: ChatPrompt) -> tuple[bytes, str]:
    signal.setitimer(signal.ITIMER_PROF, PROCESSOR_S)
    try:
        return PROMPT, renderer.render(chat)
    except InvalidRequestError as error:
        return INVALID, f"{error.field}\n{error.problem}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def read(source: BinaryIO) -> bytes | None:
    """The next message; None at the end of the input."""
    length = source.read(LENGTH.size)
    return source.read(LENGTH.unpack(length)[0]) if len(length) == LENGTH.size else None
