"""Progress of transformers' loading: its progress bars, which are not shown, call ours."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from transformers.utils import logging as transformers_logging

Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes in all)."""


class _Bar:
    """Progress bar of transformers: reports the share of its items that were used as bytes of ``num_bytes``."""

    def __init__(self, items: Sequence[Any], report: Progress, num_bytes: int) -> None:
        self._items, self._report, self._num_bytes = items, report, num_bytes

    def __iter__(self) -> Iterator[Any]:
        total = max(1, len(self._items))
        for done, item in enumerate(self._items, 1):
            yield item
            self._report(self._num_bytes * done // total, self._num_bytes)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is shown."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


@contextlib.contextmanager
def reporting_progress(progress: Progress | None, num_bytes: int) -> Iterator[None]:
    """Call ``progress`` for what transformers loads within, ``num_bytes`` in all."""
    report = progress or (lambda done, total: None)

    def make_bar(_: Callable[..., Any], inputs: tuple[Any, ...], options: dict[str, Any]) -> _Bar:
        items = inputs[0] if inputs else options.get("iterable")
        return _Bar(items if items is not None else (), report, num_bytes)

    set_hook = getattr(transformers_logging, "set_tqdm_hook", lambda hook: None)  # older releases have none
    before = set_hook(make_bar)
    try:
        yield
    finally:
        set_hook(before)
