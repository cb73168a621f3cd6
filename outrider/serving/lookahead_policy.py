"""Whether a session's next item is worth computing before it is asked for.

A session without drafts asks for one token, then for the one after it: the service knows the question before the
coordinator does, and may work on it while the answer travels. A session that speculates asks about tokens that only
its draft knows, and what is computed for others meanwhile makes it wait: nothing is computed ahead while anybody
speculates. Owns who does. Computes nothing.
"""

from __future__ import annotations

from outrider.serving.session_table import SessionKey
from outrider.serving.token_budget import Job

_PLAIN_STEPS = 2
"""So many in a row make it likely that another follows: between drafts there may be one."""


class LookaheadPolicy:
    """Fed with every item that came."""

    def __init__(self) -> None:
        self._plain_steps: dict[SessionKey, int] = {}
        self._speculating: set[SessionKey] = set()

    def note_item(self, key: SessionKey, job: Job) -> None:
        """A session has asked for something."""
        is_plain = job.num_left == 1
        self._plain_steps[key] = self._plain_steps.get(key, 0) + 1 if is_plain else 0
        if is_plain:
            self._speculating.discard(key)
        elif job.num_last > 1:
            self._speculating.add(key)

    def note_end(self, key: SessionKey) -> None:
        """It will ask for nothing more."""
        self._plain_steps.pop(key, None)
        self._speculating.discard(key)

    def drop_link(self, link_id: int) -> None:
        """None of its sessions will."""
        for key in [key for key in self._plain_steps if key[0] == link_id]:
            self.note_end(key)

    def allows(self, key: SessionKey) -> bool:
        """Whether its next item may be computed now."""
        return not self._speculating and self._plain_steps.get(key, 0) >= _PLAIN_STEPS
