"""Statistics of grammars: times of compiling and of masks, and failures."""

from __future__ import annotations

import threading

from outrider.readings import STAGE_SECONDS, Histogram, Reading


class GrammarStatistics:
    """Statistics of the grammars of one compiler. Thread-safe."""

    def __init__(self) -> None:
        self.compile_seconds = Histogram(STAGE_SECONDS)
        """Compile times of grammars that were not cached."""
        self.mask_seconds = Histogram(STAGE_SECONDS)
        """Times of the mask of one position."""
        self.num_failures = 0
        """Grammars that were refused."""
        self._lock = threading.Lock()

    def note_compiled(self, seconds: float) -> None:
        """Count a grammar."""
        with self._lock:
            self.compile_seconds.observe(seconds)

    def note_refused(self) -> None:
        """Count a grammar that was refused."""
        with self._lock:
            self.num_failures += 1

    def note_masks(self, seconds: float, count: int) -> None:
        """Count the masks of positions that were made together."""
        with self._lock:
            self.mask_seconds.observe(seconds / count, count)

    def compile_readings(self) -> list[Reading]:
        """Readings of a process that compiles grammars of requests first."""
        return [
            Reading("outrider_grammar_compile_seconds", self.compile_seconds.read()),
            Reading("outrider_grammar_failures_total", self.num_failures),
        ]

    def mask_readings(self) -> list[Reading]:
        """Readings of a process that masks logits."""
        return [Reading("outrider_grammar_mask_seconds", self.mask_seconds.read())]
