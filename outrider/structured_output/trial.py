"""Trial of a grammar in a process of its own, which the kernel ends: the engine's compiler cannot be interrupted.

Only grammars of kinds that may take long are tried, since each trial starts a process.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys

from llguidance import LLMatcher, LLTokenizer

from outrider.errors import UnavailableError
from outrider.structured_output.schemas import count_remainders
from outrider.types import Grammar

_MOST_PATTERNS = 16
"""Patterns beside ``allOf`` or ``$ref``: texts that match so many at once may take minutes."""
_MOST_INTERSECTIONS = 8
"""Operators of a grammar in the engine's form of Lark, for the same reason."""
_MOST_REMAINDERS = 5_000
"""Remainders of all ``multipleOf`` that are followed at once: some 50 ms."""
_MOST_CHARACTERS = 100_000
"""Bound on a text whose ``multipleOf`` are read, on the event loop."""
_DIVISOR = re.compile(r'"multipleOf"\s*:\s*([0-9.eE+-]+)')
_HIDDEN = re.compile(r"\\u00[2-7]")
"""Letters that are escaped without need: the keywords of such a text are not found in it."""
_MEMORY_BYTES = 2 << 30
PATIENCE_S = 20.0
"""Wall-clock time of one trial, on a machine that gives the process hardly any processor time."""
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME")
"""Variables that the process gets; others may be secrets."""
_MAIN = "import sys; sys.path[:] = {path!r}; from outrider.structured_output.trial import main; main({seconds!r})"


def may_take_long(grammar: Grammar) -> bool:
    """True for a kind of grammars of which some take long. All known others compile in 0.2 s."""
    text = grammar.text
    joins_patterns = ("allOf" in text or "$ref" in text) and text.count('"pattern"') > _MOST_PATTERNS
    if joins_patterns or text.count("&") > _MOST_INTERSECTIONS or _HIDDEN.search(text):
        return True
    return "multipleOf" in text and (len(text) > _MOST_CHARACTERS or not _has_few_remainders(text))


def is_compiled_within(grammar: Grammar, translated: str, seconds: float) -> bool:
    """True if the grammar, ``translated`` to the engine's form, takes no more processor time; true without a trial for
    one that does not take long. ``UnavailableError`` if the machine has no room for a trial.
    """
    if not may_take_long(grammar):
        return True
    command = [sys.executable, "-c", _MAIN.format(path=sys.path, seconds=seconds)]
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    try:
        done = subprocess.run(
            command, input=translated.encode(), env=environment, timeout=PATIENCE_S, capture_output=True, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"a grammar that may take long cannot be tried now: {error}") from error
    return done.returncode == 0


def _has_few_remainders(text: str) -> bool:
    try:
        divisors = [float(divisor) for divisor in _DIVISOR.findall(text)]
    except ValueError:
        return False
    multiple, rest = count_remainders(divisors)
    return len(divisors) * rest <= _MOST_REMAINDERS and multiple <= _MOST_REMAINDERS * rest


def main(seconds: float) -> None:
    """Compile the grammar of the standard input, within ``seconds`` of processor time."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    translated, tokenizer = sys.stdin.read(), LLTokenizer("byte")
    signal.setitimer(signal.ITIMER_PROF, seconds)
    LLMatcher(tokenizer, translated, log_level=0)
