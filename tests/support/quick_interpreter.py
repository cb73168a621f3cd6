"""Triton's interpreter without the work that no test reads, which takes two thirds of its time."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any


def set_up_quick_interpreter() -> None:
    """For processes with ``TRITON_INTERPRET=1``: kernels compute the same numbers in a third of the time.

    Triton 3.7 replaces the functions of ``triton.language`` at every call of a device function: here once, and for
    good. It computes integer sums and products again in 64 bits for an assertion that is off: not here.
    """
    from triton import language
    from triton.runtime import interpreter

    internals: Any = interpreter
    builder = internals.interpreter_builder
    assert not builder.options.debug, "overflows are asserted"
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    internals._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
    internals._patch_lang = lambda _function: internals._LangPatchScope()
