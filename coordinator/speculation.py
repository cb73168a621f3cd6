"""How long proposals are: the policy that a coordinator's sessions share.

Knows the default, the load and the switch by load. Refuses to know tokens: a length may depend on anything known before
a token is drawn and never on that token, or throwing drafts away would bias the output.
"""

from __future__ import annotations

from outrider.limits import MAX_DRAFT_LENGTH


class DraftLengthPolicy:
    """Draft lengths by request and by load.

    With ``disable_by_batch_size`` n above 0 nothing is drafted while n or more requests run or wait; drafting is on
    again as soon as fewer do. Without a draft nothing is wanted at all.
    """

    def __init__(self, default_length: int, *, disable_by_batch_size: int = 0, has_draft: bool = True) -> None:
        self._default_length = default_length
        self._limit = MAX_DRAFT_LENGTH if has_draft else 0
        self._disable_by_batch_size = disable_by_batch_size
        self._num_requests = 0

    def set_load(self, num_requests: int) -> None:
        """Say how many requests run or wait."""
        self._num_requests = num_requests

    @property
    def is_off_by_load(self) -> bool:
        """Whether the load keeps every session from drafting."""
        return 0 < self._disable_by_batch_size <= self._num_requests

    def wanted(self, requested: int | None) -> int:
        """The draft length of a request whatever the load; ``requested`` is its own wish."""
        return min(self._default_length if requested is None else requested, self._limit)

    def length(self, requested: int | None) -> int:
        """The draft length of a request's next step, before it is trimmed to what fits."""
        return 0 if self.is_off_by_load else self.wanted(requested)
