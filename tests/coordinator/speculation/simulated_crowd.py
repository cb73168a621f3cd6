"""Several coordinators on one pair, simulated: each has a controller of its own, and they share forwards."""

from __future__ import annotations

from itertools import chain

from outrider_coordinator.speculation import ControlledSession, DraftLengthController
from tests.coordinator.speculation.simulated_load import Load, profile_of

_PROMPT, _MOST_INLINE = 128, 16


class Crowd:
    """Controllers whose sessions are all in each forward."""

    def __init__(self, load: Load, num_coordinators: int, *, max_length: int = 8) -> None:
        self.load = load
        self.controllers = [DraftLengthController(max_length, profile_of(load.pair)) for _ in range(num_coordinators)]
        self._sessions: list[list[ControlledSession]] = [[] for _ in self.controllers]
        self._max_length = max_length
        self._lags: dict[ControlledSession, int] = {}

    def run(self, num_users: int, seconds: float) -> Load:
        """So many users, divided evenly."""
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
        self._tell(lengths, [(draft, target, len(whole), sum(whole))] * len(lengths), round_ms)

    def _lengths(self) -> list[list[int]]:
        pairs = zip(self.controllers, self._sessions, strict=True)
        return [[controller.length(session) for session in sessions] for controller, sessions in pairs]

    def _bring_text(self, lengths: list[list[int]]) -> float:
        """Milliseconds for the text of drafts that catch up, or that are asked and lack much."""
        num_tokens = 0
        for controller, sessions, own in zip(self.controllers, self._sessions, lengths, strict=True):
            for session, length in zip(sessions, own, strict=True):
                if controller.is_catching_up(session):
                    num_tokens += self._lags[session]
                    self._lags[session] = -1  # this step's token makes it 0
                elif length and self._lags[session] > _MOST_INLINE:
                    num_tokens += self._lags[session]
        return self.load.pair.prefill(num_tokens)

    def _tell(self, lengths: list[list[int]], forwards: list[tuple[float, float, int, int]], round_ms: float) -> None:
        """``forwards``: of each coordinator's sessions: milliseconds of draft and target, rows, and draft tokens."""
        load, now = self.load, self.load.now + round_ms / 1e3
        accepted = [[load.accepted(number, length) for number, length in enumerate(own)] for own in lengths]
        num_tokens = sum(map(sum, accepted)) + sum(map(len, lengths))
        num_drafting = sum(length > 0 for length in chain.from_iterable(lengths))
        load.note(round_ms, num_tokens, max(chain.from_iterable(lengths)))
        for index, (controller, sessions) in enumerate(zip(self.controllers, self._sessions, strict=True)):
            own, (draft, target, rows, drafted) = lengths[index], forwards[index]
            if max(own):
                drafting = num_drafting if rows > len(own) else sum(length > 0 for length in own)
                controller.note_draft(drafting, max(own), draft / 1e3)
            controller.begin(now)
            for session, length in zip(sessions, own, strict=True):
                self._lags[session] = 0 if length else self._lags[session] + 1
            controller.note_verdicts(
                (session, length, count, self._lags[session])
                for session, length, count in zip(sessions, own, accepted[index], strict=True)
            )
            others = len(list(chain.from_iterable(lengths))) - len(own), sum(map(sum, lengths)) - sum(own)
            controller.end(
                rows=rows, tokens=rows + drafted, seconds=target / 1e3, other_rows=others[0], other_drafts=others[1]
            )
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
        for own in lengths:
            draft, target, whole = self.load.round_ms(len(own), own)
            forwards.append((draft, target, len(own), sum(own)))
            round_ms += whole
        self._tell(lengths, forwards, round_ms)
