"""Several coordinators on one pair, simulated: each has a controller of its own, and they share forwards."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from outrider.serving.link_loads import LinkLoads
from outrider.serving.link_loads import Load as LinkLoad
from outrider_coordinator.speculation import ControlledSession, DraftLengthController
from tests.coordinator.speculation.simulated_load import Load, profile_of, report_of

_PROMPT, _MOST_INLINE = 128, 16


@dataclass
class Forward:
    """Forward of its sessions as a coordinator sees it; times in milliseconds."""

    draft: float
    target: float
    rows: int
    drafted: int
    others: LinkLoad


class Crowd:
    """Controllers whose sessions are all in each forward."""

    def __init__(self, load: Load, num_coordinators: int, *, max_length: int = 8) -> None:
        self.load = load
        self.controllers = [DraftLengthController(profile_of(load.pair)) for _ in range(num_coordinators)]
        self._sessions: list[list[ControlledSession]] = [[] for _ in self.controllers]
        self._max_length = max_length
        self._lags: dict[ControlledSession, int] = {}
        self._loads = LinkLoads()

    def run(self, num_users: int, seconds: float) -> Load:
        """Load of ``num_users``, divided evenly."""
        end = self.load.now + seconds
        for controller, sessions in zip(self.controllers, self._sessions, strict=True):
            while len(sessions) > num_users // len(self.controllers):
                controller.leave(sessions.pop())
            while len(sessions) < num_users // len(self.controllers):
                session = ControlledSession(self._max_length)
                controller.enter(session)
                sessions.append(session)
                self._lags[session] = -1 if controller.will_draft(_PROMPT) else _PROMPT
        while self.load.now < end:
            self.round()
        return self.load

    def round(self) -> None:
        """One step of all sessions."""
        lengths = self._lengths()
        whole = list(chain.from_iterable(lengths))
        draft, target, round_ms = self.load.round_ms(len(whole), whole)
        round_ms += self._bring_text(lengths)
        self._note_forward(dict(enumerate(lengths)))
        forwards = [
            Forward(draft, target, len(whole), sum(whole), self._loads.others_of(link)) for link in range(len(lengths))
        ]
        self._tell(lengths, forwards, round_ms)

    def _note_forward(self, lengths: dict[int, list[int]]) -> None:
        """A forward of these links' sessions has ended."""
        rows, drafts = ({link: count(own) for link, own in lengths.items()} for count in (len, sum))
        self._loads.note_forward(rows, lambda: drafts)

    def _lengths(self) -> list[list[int]]:
        pairs = zip(self.controllers, self._sessions, strict=True)
        return [[controller.length(session) for session in sessions] for controller, sessions in pairs]

    def _bring_text(self, lengths: list[list[int]]) -> float:
        """Milliseconds for the text of drafts that catch up, or that are asked and lack much."""
        num_tokens = 0
        for controller, sessions, own in zip(self.controllers, self._sessions, lengths, strict=True):
            for session, length in zip(sessions, own, strict=True):
                if controller.is_prefilling_drafts(session):
                    num_tokens += self._lags[session]
                    self._lags[session] = -1  # this step's token makes it 0
                elif length and self._lags[session] > _MOST_INLINE:
                    num_tokens += self._lags[session]
        return self.load.pair.prefill(num_tokens)

    def _tell(self, lengths: list[list[int]], forwards: list[Forward], round_ms: float) -> None:
        """``forwards``: of each coordinator's sessions."""
        load, now = self.load, self.load.now + round_ms / 1e3
        accepted = [[load.accepted(number, length) for number, length in enumerate(own)] for own in lengths]
        num_tokens = sum(map(sum, accepted)) + sum(map(len, lengths))
        num_drafting = sum(length > 0 for length in chain.from_iterable(lengths))
        load.note(round_ms, num_tokens, max(chain.from_iterable(lengths)))
        for index, (controller, sessions) in enumerate(zip(self.controllers, self._sessions, strict=True)):
            own, forward = lengths[index], forwards[index]
            if max(own):
                drafting = num_drafting if forward.rows > len(own) else sum(length > 0 for length in own)
                controller.note_draft(drafting, max(own), forward.draft / 1e3)
            controller.begin(now)
            for session, length in zip(sessions, own, strict=True):
                self._lags[session] = 0 if length else self._lags[session] + 1
            for session, length, count in zip(sessions, own, accepted[index], strict=True):
                controller.add_verdict((session, length, count, self._lags[session]))
            others = forward.others[0], forward.others[1]
            controller.add_end(report_of(forward.rows, forward.rows + forward.drafted, forward.target, others))
            controller.learn()
            controller.choose()


class TakingTurns(Crowd):
    """The same where each coordinator's sessions have forwards of their own as long as any session drafts."""

    def round(self) -> None:
        """One step of all sessions, or as many forwards as there are coordinators."""
        lengths = self._lengths()
        if not any(chain.from_iterable(lengths)):
            super().round()
            return
        forwards, round_ms = [], self._bring_text(lengths)
        for link, own in enumerate(lengths):
            draft, target, whole = self.load.round_ms(len(own), own)
            self._note_forward({link: own})
            forwards.append(Forward(draft, target, len(own), sum(own), self._loads.others_of(link)))
            round_ms += whole
        self._tell(lengths, forwards, round_ms)
