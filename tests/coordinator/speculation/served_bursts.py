"""Bursts of requests as services serve them: slow first rounds, noise, prompts in pieces, commands before choices.

Harder than ``Bursts`` in what a recorded run on a GPU showed: the first rounds of a kind take several times as long,
and the first after a pause or with other numbers of rows somewhat longer; the commands of a message leave before the
controller learns from it, so that a choice takes effect a round later; a benchmark's requests of one token, and plain
requests, come between. A request's text decides which drafts are accepted, so that all arms can walk the same texts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from outrider_coordinator.speculation import LONGEST_INLINE_FEED, ControlledSession, DraftLengthController
from tests.coordinator.speculation.simulated_load import H200, FixedLength, profile_of, report_of

_COMPUTED = 128
"""Tokens of a prompt that the target computes: of a longer one it finds the others in its prefix cache."""
_PROMPTS_A_FORWARD = 8
_MOST_DRAFTED = 8
_ROUNDS_NOT_AHEAD = 2
_TEXT_ROUNDS = 3
"""Plain rounds until a draft has told that it holds the text that it was brought."""
_AHEAD_MS = 0.1
"""Gap between plain forwards that are computed ahead."""


@dataclass(frozen=True)
class Slowness:
    """Extra time of the first rounds of a kind."""

    most: float
    """Extra time of the first round, as a share of the usual time."""
    rounds: float
    """Rounds after which the share is a third."""

    def at(self, num_before: int) -> float:
        return self.most * math.exp(-num_before / self.rounds)


COLD, AFTER_PAUSE, NEW_ROWS = Slowness(3.0, 6.0), Slowness(0.6, 3.0), Slowness(0.25, 2.0)
"""Slowness in a mode for the first time, after an idle pause, and after the rows of a round have changed by a quarter.
"""


class Devices:
    """The stages of a pair with what makes them slow, and the clock."""

    def __init__(self, pair: H200, *, seed: int, noise: float, is_cold: bool) -> None:
        self.pair, self.now = pair, 0.0
        self._random, self._noise, self._is_cold = np.random.default_rng(seed), noise, is_cold
        self._num_rounds = {False: 0, True: 0}
        self._since_pause = self._since_rows = self._rows = self._num_plain = 0

    def pause(self, seconds: float) -> None:
        """Nothing is served."""
        self.now += seconds
        self._since_pause = 0

    def shaken(self, milliseconds: float) -> float:
        return milliseconds * math.exp(self._noise * float(self._random.standard_normal()))

    def prompts_ms(self, rows: int, num_prompts: int) -> float:
        """Time of a forward with so many prompts and the rows that decode beside them."""
        self._num_plain = 0
        return self._slowness(rows, drafts=False) * self.shaken(4.0 + 2.2 * num_prompts)

    def round_ms(self, lengths: list[int]) -> tuple[float, float, float]:
        """(draft, target, whole) of a round of sessions that draft so many tokens."""
        rows, longest, drafting = len(lengths), max(lengths), sum(length > 0 for length in lengths)
        slow = self._slowness(rows, drafts=longest > 0)
        target = slow * self.shaken(self.pair.target(rows, rows + sum(lengths)))
        if longest:
            self._num_plain = 0
            draft = slow * self.shaken(self.pair.draft(drafting, longest))
            return draft, target, draft + target + slow * self.shaken(self.pair.between(rows))
        self._num_plain += 1
        is_ahead = self._num_plain > _ROUNDS_NOT_AHEAD
        return 0.0, target, target + (_AHEAD_MS if is_ahead else slow * self.shaken(self.pair.plain_between(rows)))

    def _slowness(self, rows: int, *, drafts: bool) -> float:
        if abs(rows - self._rows) > 0.25 * self._rows:
            self._rows, self._since_rows = rows, 0
        cold = COLD.at(self._num_rounds[drafts]) if self._is_cold else 0.0
        found = 1.0 + cold + AFTER_PAUSE.at(self._since_pause) + NEW_ROWS.at(self._since_rows)
        self._num_rounds[drafts] += 1
        self._since_pause += 1
        self._since_rows += 1
        return found


@dataclass
class _Text:
    """Text that a draft is brought."""

    num_tokens: int
    num_to_compute: int
    num_rounds: int = _TEXT_ROUNDS
    """Rounds until the draft has reported what it has computed."""


class Served:
    """One coordinator's requests on a pair: burst after burst."""

    def __init__(
        self,
        pair: H200,
        acceptance: float,
        *,
        seed: int,
        length: int | None = None,
        is_cold: bool = True,
        noise: float = 0.07,
    ) -> None:
        """``length``: a fixed draft length; None: chosen ones. ``is_cold``: a process's first rounds are slow."""
        self.devices = Devices(pair, seed=seed, noise=noise, is_cold=is_cold)
        self.acceptance = acceptance
        self.is_chosen = length is None
        self._limit = 0 if length == 0 else _MOST_DRAFTED
        self.controller = DraftLengthController(profile_of(pair)) if length is None else FixedLength(length)
        self.rounds: list[tuple[int, float]] = []
        """Rounds of the last burst: longest draft length and seconds of each, those of prompts left out."""
        self._seed = seed
        self._left: dict[ControlledSession, int] = {}
        """Tokens to come of each request whose prompt has ended."""
        self._lags: dict[ControlledSession, int] = {}
        self._lengths: dict[ControlledSession, int] = {}
        """Draft lengths of the commands that have left, and below whose drafts are brought their text."""
        self._fed: dict[ControlledSession, bool] = {}
        self._brought: dict[ControlledSession, _Text] = {}
        """Texts on their way to a draft."""
        self._users: dict[ControlledSession, int] = {}
        self._cached: set[int] = set()
        """Users whose text the draft has in its prefix cache."""
        self._texts: dict[ControlledSession, np.ndarray] = {}
        """Random numbers of each request, by place: the draft's token is accepted where the number is below the
        acceptance."""

    def burst(
        self,
        num_users: int,
        *,
        num_tokens: int = 256,
        drafts: bool = True,
        pause_s: float = 0.2,
        rounds_ahead: int = 0,
    ) -> float:
        """Seconds until the last of so many requests has ended, prompts included; without ``drafts`` they are plain.

        ``rounds_ahead``: decoded of the first one before the others come.
        """
        pair, limit = self.devices.pair, self._limit if drafts else 0
        self.devices.pause(pause_s)
        began = self.devices.now
        sessions = [
            ControlledSession(limit, reads_states=pair.reads_states, max_tokens=num_tokens) for _ in range(num_users)
        ]
        texts = np.random.default_rng(self._seed).random((num_users, num_tokens))
        self._texts = dict(zip(sessions, texts, strict=True))
        self._users = {session: user for user, session in enumerate(sessions)}
        self.rounds, self._lags, self._brought = [], {}, {}
        self._take_prompts(sessions, num_tokens, rounds_ahead)
        while self._left:
            self._round()
        return self.devices.now - began

    def _take_prompts(self, sessions: list[ControlledSession], num_tokens: int, rounds_ahead: int) -> None:
        """The first request comes alone, the others while its prompt is computed."""
        waiting = list(sessions)
        arrived, num_prompts = waiting[:1], 1
        while waiting:
            text_ms = self._enter(arrived)
            coming, waiting = waiting[:num_prompts], waiting[num_prompts:]
            begun = list(self._left)
            target = self.devices.prompts_ms(len(begun) + len(coming), len(coming))
            self.devices.now += (target + text_ms) / 1e3
            self._left.update(dict.fromkeys(coming, num_tokens))
            both = begun + coming
            self._tell(both, [0] * len(both), 0.0, target, tokens=len(begun) + _COMPUTED * len(coming))
            for _ in range(0 if begun else rounds_ahead):
                self._round()
            arrived, num_prompts = waiting, _PROMPTS_A_FORWARD

    def _enter(self, arrived: list[ControlledSession]) -> float:
        """Milliseconds for the prompts that drafts compute at the same time."""
        num_tokens = 0
        prompt = self.devices.pair.prompt_tokens
        for session in arrived:
            if session not in self._lags:
                self.controller.enter(session)
                is_both = session.limit > 0 and (not self.is_chosen or self.controller.will_draft(prompt))
                self._lags[session] = -1 if is_both else prompt
                num_tokens += self._computed(session, prompt) if is_both else 0
        return self.devices.pair.prefill(num_tokens)

    def _round(self) -> None:
        """One step of all sessions. One whose draft lacks its text decodes plainly while that is brought."""
        sessions, pair = list(self._left), self.devices.pair
        lengths = [self._asked_length(each) for each in sessions]
        lagging = [
            index
            for index, session in enumerate(sessions)
            if self.is_chosen and self._lags[session] > LONGEST_INLINE_FEED and (lengths[index] or self._fed[session])
        ]
        for index in lagging:
            lengths[index] = 0
        room = pair.text_beside_drafts if any(lengths) else pair.text_a_round
        num_tokens = 0
        for index in lagging:
            num_tokens += self._bring_text(sessions[index], room - num_tokens)
        draft, target, whole = self.devices.round_ms(lengths)
        text_ms = self.devices.shaken(pair.prefill(num_tokens))
        if any(lengths) and num_tokens:
            text_ms = max(text_ms, target)  # it waits for the target's forward, and the next proposals for it
        if num_tokens:
            self.controller.note_draft_text()
        self.devices.now += (whole + text_ms) / 1e3
        self.rounds.append((max(lengths), (whole + text_ms) / 1e3))
        self._tell(sessions, lengths, draft, target, tokens=len(sessions) + sum(lengths))

    def _asked_length(self, session: ControlledSession) -> int:
        """Draft length of the session's command, cut to what is of use."""
        return min(self._lengths[session], self._left[session] - 1) if session.limit else 0

    def _bring_text(self, session: ControlledSession, room: int) -> int:
        """Tokens of the session's text that its draft computes now, of at most ``room``; it holds them later."""
        text = self._brought.get(session)
        if text is None:
            lag = self._lags[session]
            text = self._brought[session] = _Text(lag, self._computed(session, lag))
        taken = min(text.num_to_compute, room)
        text.num_to_compute -= taken
        if not text.num_to_compute:
            text.num_rounds -= 1
            if text.num_rounds < 0:
                self._lags[session] -= text.num_tokens
                del self._brought[session]
        return taken

    def _computed(self, session: ControlledSession, lag: int) -> int:
        """Tokens that the session's draft computes of a text that it has not seen."""
        user = self._users.get(session)
        if not self.devices.pair.are_texts_cached or user is None:
            return self._lacked(lag)
        is_cached = user in self._cached
        self._cached.add(user)
        return 0 if is_cached else self._lacked(lag)

    def _lacked(self, lag: int) -> int:
        """Tokens of ``lag`` unseen ones that a draft has to prefill."""
        return min(lag, self.devices.pair.most_lacked)

    def _tell(
        self, sessions: list[ControlledSession], lengths: list[int], draft: float, target: float, *, tokens: int
    ) -> None:
        """Let the controller hear of a round, and take the lengths of the next one before it learns and chooses."""
        controller = self.controller
        if max(lengths):
            controller.note_draft(sum(length > 0 for length in lengths), max(lengths), draft / 1e3)
        controller.begin(self.devices.now)
        for session, length in zip(sessions, lengths, strict=True):
            accepted = self._accepted(session, length)
            self._left[session] -= accepted + 1
            self._lags[session] = 0 if length else self._lags[session] + 1
            controller.add_verdict((session, length, accepted, self._lacked(self._lags[session])))
        controller.learn()
        for session in sessions:
            self._lengths[session] = controller.length(session)
            self._fed[session] = controller.is_prefilling_drafts(session)
            if self._left[session] <= 0:
                del self._left[session]
                controller.leave(session)
        controller.add_end(report_of(len(sessions), tokens, target))
        controller.learn()
        controller.choose()

    def _accepted(self, session: ControlledSession, length: int) -> int:
        """Draft tokens accepted of so many, by the place in the request's text."""
        place = len(self._texts[session]) - self._left[session]
        is_accepted = self._texts[session][place : place + length] < self.acceptance
        return length if is_accepted.all() else int(is_accepted.argmin())
