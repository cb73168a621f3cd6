"""State feed: which hidden states the target is asked for on behalf of a draft that reads them."""

from __future__ import annotations

from outrider_coordinator.session.drafting import room_for
from outrider_coordinator.session.state import SessionState
from outrider_coordinator.speculation import LONGEST_INLINE_FEED

MAX_PARTS_UNDER_WAY = 4
"""Parts of a long text, of ``MAX_FEED_BYTES`` each, whose hidden states are under way to drafts at the same time, of
all sessions: what the ring of a tensor plane on a GPU holds.
"""


def is_to_follow(session: SessionState) -> bool:
    """True if a draft that reads hidden states is to follow the text, for this step or for later ones. Where it is not,
    as for requests without speculation and while decoding is plain, the session is served as if the draft read none.
    """
    if not (session.draft.reads_states and session.policy.is_to_draft(session.speculation)):
        return False
    return _has_capacity(session)


def is_feed_due(session: SessionState) -> bool:
    """True if its draft is to be asked how much it holds, or to take the hidden states that have come for it. Those of
    a prompt it takes also once it is not to draft: unread, they would hold the memory that others' travel through.
    """
    side = session.draft
    holds_prompt = side.states.num_rows > LONGEST_INLINE_FEED
    is_due = not side.has_answered or holds_prompt or side.states.is_full
    return is_due and (is_to_follow(session) or (holds_prompt and _has_capacity(session)))


def _has_capacity(session: SessionState) -> bool:
    return room_for(session, 1, session.tokens.length, session.output.num_remaining - 1) > 0


def wants_states(session: SessionState) -> bool:
    """True if the target is to hand over states with this score. Not past the length of the draft, and not while it
    does not take those that wait for it: they would grow with the text. Once it has, the target computes the rest anew.
    """
    side = session.draft
    if not side.wants_states:
        return False
    if not session.policy.is_to_draft(session.speculation):
        if side.asked is None:  # otherwise it is taking them
            side.states.clear(side.states.start)  # once it is to draft, the target computes from there
        return False
    if session.target.held == 0 and _lacks_prompt_logprobs(session) and part_length(session, side.states.end):
        return False  # they are of the whole prompt: states come with the next step
    if not side.room_after(session.tokens.length, 1):
        side.states.clear()
        return False
    return (side.asked is None or not side.states.is_full) and _have_way(session)


def _have_way(session: SessionState) -> bool:
    """True if the states of so many positions can travel beside those of other sessions. Past the room of a tensor
    plane they would go in messages, for which all sessions wait; the target computes them anew later instead.
    """
    side, length = session.draft, session.tokens.length
    num_positions = (part_length(session, side.states.end) or length) - side.states.end
    most = MAX_PARTS_UNDER_WAY * side.facts.states_at_a_time
    if not most or num_positions <= LONGEST_INLINE_FEED:
        return True
    others = session.policy.num_states(session.speculation)
    return not others or others + num_positions <= most


def note_states(session: SessionState, asked_to: int | None = None) -> None:
    """Note how many positions' states are under way, with those asked for now, up to that position."""
    states = session.draft.states
    session.speculation.num_states = (asked_to or states.end) - states.start


def hands_over_states(session: SessionState) -> bool:
    """True if the target hands over just the states of what it scores, since the draft has all before."""
    draft, target = session.draft, session.target
    is_same = target.hidden_state_layers == draft.facts.hidden_state_layers
    return draft.wants_states and is_same and not draft.lacks_states(session.tokens.length)


def part_length(session: SessionState, first: int) -> int | None:
    """End of the part of a long text whose hidden states are asked for now; None: it is the last part."""
    most, length = session.draft.facts.states_at_a_time, session.tokens.length
    return first + most if most and length - first > most and not session.proposal.token_ids else None


def _lacks_prompt_logprobs(session: SessionState) -> bool:
    return session.engine_request.num_prompt_logprobs is not None and session.prompt_logprobs is None
