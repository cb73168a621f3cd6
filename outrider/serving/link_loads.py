"""Link loads: the rows and draft tokens of other links that the report of a link tells.

Links share forwards, or have forwards of their own in turn. Both delay each other alike, so a report counts the
forwards since the link's report before, its own and those of other links alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

Load: TypeAlias = tuple[int, int]
"""Rows, and draft tokens of them."""


class LinkLoads:
    """Forwards of one core by link, as each of the others is told of them."""

    def __init__(self) -> None:
        self._largest: dict[int, dict[int, Load]] = {}
        """Largest load by link and other link: the other's part of the forward with most rows of it, since the link's
        report.
        """
        self._reported: set[int] = set()
        """Links that had a report after the newest forward: the next forward begins anew for them."""

    def note_forward(self, rows: Mapping[int, int], drafts: Callable[[], Mapping[int, int]]) -> None:
        """A forward with this many rows and draft tokens of each link ended; ``drafts`` is asked where several links
        are served.
        """
        for link_id in rows:
            self._largest.setdefault(link_id, {})
        if len(self._largest) < 2:
            return
        for link_id in self._reported:
            self._largest[link_id].clear()
        self._reported.clear()
        num_drafts = drafts()
        for other, num_rows in rows.items():
            load = num_rows, num_drafts.get(other, 0)
            for link_id, largest in self._largest.items():
                if link_id != other:
                    largest[other] = max(load, largest.get(other, load))

    def others_of(self, link_id: int) -> Load:
        """Rows and draft tokens of all other links, for a report of the link. Reports between which no forward has
        ended tell the same.
        """
        largest = self._largest.get(link_id)
        if not largest:
            return 0, 0
        self._reported.add(link_id)
        loads = largest.values()
        return sum([rows for rows, _ in loads]), sum([drafts for _, drafts in loads])

    def drop_link(self, link_id: int) -> None:
        """Forget a link that is gone."""
        self._largest.pop(link_id, None)
        self._reported.discard(link_id)
        for largest in self._largest.values():
            largest.pop(link_id, None)
