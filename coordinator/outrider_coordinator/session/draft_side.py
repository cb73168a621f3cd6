"""State of a session on its draft: what it holds, and what it was asked.

The bonus-token hole, late replies and rebuilds follow from this state. Decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.types import Evidence
from outrider.values import step_value
from outrider_coordinator.session import table_columns as col
from outrider_coordinator.session.hidden_states import MAX_FEED_BYTES, HiddenStateBuffer
from outrider_coordinator.session.readiness import Readiness, ServiceSide
from outrider_coordinator.session.table import ANY_LENGTH, Flag, IntColumn, Row
from outrider_coordinator.stats.spec_decode_stats import WithoutDraft


@dataclass(frozen=True, slots=True)
class DraftFacts:
    """Facts about a draft that a session needs."""

    max_length: int = 0
    """The longest text it can propose for; 0: any."""
    num_token_ids: int = 0
    """Ids it may propose are below this; 0: any."""
    hidden_state_layers: tuple[int, ...] = ()
    """Layers of the target whose hidden states it reads; mostly none."""
    shares_device: bool = False
    """True if it computes on the target's device, so that each takes the other's time."""
    hidden_state_bytes: int = 0
    """Size of the hidden states of one position; 0: not known."""
    longest_prefill: int = 0
    """Tokens that it computes of a new text, the last ones; 0: all."""

    @property
    def states_at_a_time(self) -> int:
        """Positions whose hidden states one ``Score`` may ask for; 0: any number."""
        return max(1, MAX_FEED_BYTES // self.hidden_state_bytes) if self.hidden_state_bytes else 0


@step_value(frozen=True, slots=True)
class Asked:
    """An unanswered ``Extend``."""

    generation: int
    length: int
    """Committed tokens that the draft holds once it answers."""
    draft_length: int


@step_value(frozen=True, slots=True)
class Drafted:
    """A proposal that is being judged."""

    token_ids: tuple[int, ...] = ()
    evidence: Evidence = None
    opened: int = -1
    """The generation of the ``Open`` under which the draft holds it."""


NOTHING_DRAFTED = Drafted()


class DraftSide(ServiceSide):
    """State on the draft; what steps read and write is in the session's row."""

    held = IntColumn(col.DRAFT_HELD)
    """Committed tokens the draft is known to hold."""
    opened = IntColumn(col.DRAFT_OPENED)
    """The generation of the latest ``Open``."""
    losses = IntColumn(col.DRAFT_LOSSES)
    """Number of losses in a row."""
    is_late = Flag(col.IS_LATE)
    """True if the proposal came too late for its step: it is waited for, and nothing more is asked meanwhile."""
    reads_states = Flag(col.READS_STATES)
    """True if it reads hidden states of the target."""

    def __init__(self, row: Row, readiness: Readiness, facts: DraftFacts) -> None:
        super().__init__(row, col.DRAFT_READINESS, readiness)
        self.facts = facts
        self.why_away = WithoutDraft.AWAY
        """Reason why it may not be used, as long as it may not."""
        self.has_answered = False
        """True if it has answered since it was opened; one that reads hidden states thereby says how much it holds."""
        self.states = HiddenStateBuffer()
        """Hidden states that are to be sent to it."""

    @property
    def facts(self) -> DraftFacts:
        """Facts about the draft."""
        return self._facts

    @facts.setter
    def facts(self, facts: DraftFacts) -> None:
        self._facts = facts
        self.reads_states = bool(facts.hidden_state_layers)
        self.row.values[col.CAPACITY] = facts.max_length or ANY_LENGTH

    @property
    def asked(self) -> Asked | None:
        """Command that it has not answered."""
        values = self.row.values
        generation = values.item(col.DRAFT_ASKED)
        return Asked(generation, values.item(col.DRAFT_BASE), values.item(col.DRAFT_LENGTH)) if generation else None

    @asked.setter
    def asked(self, asked: Asked | None) -> None:
        numbers = (0, 0, 0) if asked is None else (asked.generation, asked.length, asked.draft_length)
        self.row.values[col.DRAFT_ASKED : col.DRAFT_LENGTH + 1] = numbers

    @property
    def wants_states(self) -> bool:
        """True if the target is to hand over states from where ``states`` ends."""
        return self.reads_states and self.has_answered and self.readiness is Readiness.OPEN

    def lacks_states(self, length: int) -> bool:
        """True if it cannot propose after ``length`` committed tokens, for want of states."""
        return self.reads_states and not (self.has_answered and self.states.end == length - 1)

    @property
    def is_usable(self) -> bool:
        """True if a step may request a proposal."""
        return self.readiness in (Readiness.OPEN, Readiness.CLOSED) and not self.is_late

    def room_after(self, length: int, wanted: int) -> int:
        """Number of the ``wanted`` tokens that can be drafted after ``length`` committed ones."""
        limit = self.facts.max_length
        return max(0, min(wanted, limit - length) if limit else wanted)

    def num_uncomputed(self, length: int) -> int:
        """Tokens that it has to compute to hold ``length`` committed ones."""
        limit = self.facts.longest_prefill
        return min(length, limit) if limit and not self.held else length - self.held

    def note_answer(self, asked: Asked, base_length: int) -> None:
        """The draft lives, and holds the committed tokens that it was brought; one that reads hidden states those that
        it says.
        """
        self.held = asked.length
        self.asked, self.is_late, self.losses = None, False, 0
        if self.reads_states:
            self.held = min(base_length, asked.length)
            self.has_answered = True
            self.states.move_to(max(0, self.held - 1))

    def note_verdict(self, drafted: Drafted, num_accepted: int) -> None:
        """Update the draft side after a verdict: of its own K tokens the draft has KV for all but the last.

        So after K acceptances it lacks one, the bonus-token hole, and the next ``Extend`` brings two tokens. One that
        reads hidden states computes its own tokens anew, now from the target's.
        """
        if self.reads_states:
            return
        if drafted.token_ids and drafted.opened == self.opened and self.readiness is Readiness.OPEN:
            self.held += min(num_accepted, len(drafted.token_ids) - 1)

    def lose(self, readiness: Readiness, why: WithoutDraft = WithoutDraft.AWAY) -> None:
        """The draft lost the session."""
        self.why_away = why
        super().lose(readiness)

    def reset(self, readiness: Readiness) -> None:
        """The draft holds nothing of this session any more, and owes no answer."""
        self.readiness = readiness
        self.held, self.asked, self.is_late = 0, None, False
        self.has_answered = False
        self.states.clear()
