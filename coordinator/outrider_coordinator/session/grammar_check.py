"""Check of emitted tokens by the coordinator's own matcher: a wrong mask of a service is an error, not an answer."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.errors import IntegrityError, InvalidRequestError
from outrider.structured_output import Matcher, Outcome


class GrammarCheck:
    """The grammar of one session, and the tokens that were emitted."""

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher
        self._token_ids: list[int] = []

    def forced_token_ids(self) -> tuple[int, ...]:
        """Canonical tokens of the only text that may come next; empty if there are several."""
        if self._matcher.follow(self._token_ids) is not Outcome.OPEN:
            return ()
        return self._matcher.forced_tokens()

    def leaves_choice(self, token_ids: Sequence[int], *, most_forced: int) -> bool:
        """True if these tokens may come next, do not end the output, and leave no text of more than ``most_forced``
        tokens without a choice. Adds nothing.
        """
        length = len(self._token_ids)
        self._token_ids += token_ids
        try:
            if self._matcher.follow(self._token_ids) is not Outcome.OPEN:
                return False
        except InvalidRequestError:  # which fails the session once the tokens are added
            return False
        finally:
            del self._token_ids[length:]
        return len(self._matcher.forced_tokens()) <= most_forced

    def take(self, token_id: int) -> None:
        """Add a token; ``IntegrityError`` for one that the grammar refuses."""
        self._token_ids.append(token_id)
        if self._matcher.follow(self._token_ids) is Outcome.REFUSED:
            place = len(self._token_ids) - 1
            raise IntegrityError(f"token {token_id} at output position {place} is refused by the request's grammar")
