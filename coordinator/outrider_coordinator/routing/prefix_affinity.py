"""Prefix affinity: the replica to which this coordinator sent the longest prefix of a text.

Stores hashes of prefixes at growing lengths, most recent first, and no tokens. A replica may have evicted the prefix
since; then the choice costs only time.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, Protocol, TypeVar

from outrider.prefix_hash import PrefixHash

MAX_ENTRIES = 65_536
"""Beginnings remembered on one side."""
_SHORT, _LONG = 16, 256
"""Granularity in tokens of prefixes that are distinguished: of the first up to ``_LONG`` tokens, and after them."""

ReplicaT = TypeVar("ReplicaT")
_Key = tuple[str, int, PrefixHash]
"""Salt, length and hash of a beginning."""


class Text(Protocol):
    """Tokens with the hash of every prefix."""

    def __len__(self) -> int:
        """Number of known prefixes."""
        ...

    def prefix_hash(self, length: int) -> PrefixHash:
        """The hash of the first ``length``."""
        ...


class PrefixAffinity(Generic[ReplicaT]):
    """Replicas of one service by the prefixes that were sent to them."""

    def __init__(self) -> None:
        self._served: OrderedDict[_Key, ReplicaT] = OrderedDict()

    def __len__(self) -> int:
        return len(self._served)

    def note(self, replica: ReplicaT, text: Text, cache_salt: str) -> None:
        """Record that a text is sent to a replica."""
        for key in _keys(text, cache_salt):
            self._served[key] = replica
            self._served.move_to_end(key)
        while len(self._served) > MAX_ENTRIES:
            self._served.popitem(last=False)

    def find(self, text: Text, cache_salt: str) -> ReplicaT | None:
        """The replica to which the longest prefix of a text was sent last; None without one."""
        for key in _keys(text, cache_salt):
            if (replica := self._served.get(key)) is not None:
                return replica
        return None

    def remove(self, replica: ReplicaT) -> None:
        """Remove a replica."""
        for key in [key for key, server in self._served.items() if server is replica]:
            del self._served[key]


def _keys(text: Text, cache_salt: str) -> list[_Key]:
    """Keys of all prefixes that are told apart, the longest first: the shortest are evicted last."""
    length = len(text)
    lengths = (*range(_SHORT, min(length, _LONG), _SHORT), *range(_LONG, length, _LONG))
    keys = [(cache_salt, known, text.prefix_hash(known)) for known in lengths]  # growing, as they are hashed fastest
    return keys[::-1]
