"""A pair of models as stage times, and sessions with given acceptances: rounds simulated one after the other.

The times are those measured on one H200 with an 8B target and a 1B draft. A round is what the coordinator sees: draft,
target, and the time in between, which plain rounds hide once the target computes ahead.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from outrider.ports import ForwardReport
from outrider.types import StepCost
from outrider_coordinator.speculation import ControlledSession, DraftLengthController
from outrider_coordinator.speculation.step_costs import StepCosts

_PLAIN = ((1, 4.22), (8, 4.32), (16, 4.41), (32, 4.60), (64, 5.31), (128, 7.0), (256, 11.0))
_SCORING = ((2, 4.6), (5, 4.76), (40, 5.27), (80, 5.85), (160, 6.64), (320, 10.42), (640, 19.0), (2304, 66.0))
_DRAFT_STEP = ((1, 0.825), (8, 1.03), (32, 1.285), (64, 1.6), (128, 2.3), (256, 3.8))


def interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    """Value between the measured points, and past the last one by the slope before it."""
    (near, at_near), (last, at_last) = points[-2:]
    if x > last:
        return at_last + (x - last) * (at_last - at_near) / (last - near)
    return float(np.interp(x, [point[0] for point in points], [point[1] for point in points]))


@dataclass(frozen=True)
class H200:
    """Milliseconds of the stages of one H200's pair."""

    num_cards: int = 1
    reads_states: bool = False
    """True if the draft reads hidden states, so that the target computes anew what it lacks."""
    prompt_tokens: int = 128
    most_lacked: int = 1_000_000
    """Tokens of text that a session's draft has to be brought at most: fewer than it has not seen with a window."""
    text_a_round: int = 1_000_000
    """Tokens of text that the draft computes in a round at most, where no session drafts."""
    text_beside_drafts: int = 1_000_000
    """The same where some do."""
    are_texts_cached: bool = False
    """True if a draft has a user's text in its prefix cache once it was brought it."""

    def target(self, rows: int, tokens: int) -> float:
        return interpolate(_PLAIN, rows) if tokens == rows else interpolate(_SCORING, tokens)

    def draft(self, rows: int, length: int) -> float:
        return 0.1 + length * interpolate(_DRAFT_STEP, rows) if length else 0.0

    def between(self, rows: int) -> float:
        return 0.68 + 0.063 * rows

    def plain_between(self, rows: int) -> float:
        return 0.60 + 0.046 * rows

    def prefill(self, tokens: int) -> float:
        """Draft's time to prefill a text."""
        return 0.007 * tokens


def costs_of(pair: H200, target_bias: float = 0.9, draft_bias: float = 1.15) -> dict[str, list[StepCost]]:
    """Step costs that the pair's services would have measured at start, wrong by these factors."""
    rows, lengths = (1, 4, 16, 64, 256), (1, 2, 4, 6, 9)
    points = [(count, length) for count in rows for length in lengths]
    target = [(*point, target_bias * pair.target(point[0], point[0] * point[1])) for point in points]
    draft = [(*point, draft_bias * pair.draft(*point)) for point in points]
    found = {"target_costs": target, "draft_costs": draft}
    return {name: [StepCost(n, k, 128, round(1e6 * ms)) for n, k, ms in each] for name, each in found.items()}


def profile_of(pair: H200, *biases: float) -> StepCosts:
    """The same as a controller's profile."""
    return StepCosts(*costs_of(pair, *biases).values())


@dataclass(frozen=True)
class TargetOverTwoCards(H200):
    """The target over two cards and the draft on one of them, as `--optimize latency` arranges them. Plain rounds and
    one user's stages are measured; scoring of more rows is interpolated from the engine's forwards, and what lies past
    the measured points is extrapolated.
    """

    num_cards: int = 2

    def target(self, rows: int, tokens: int) -> float:
        plain = ((1, 3.12), (8, 3.35), (32, 4.06), (64, 5.55))
        scoring = ((2, 3.35), (5, 3.43), (40, 3.85), (80, 4.4), (160, 5.72), (320, 8.5))
        return interpolate(plain, rows) if tokens == rows else interpolate(scoring, tokens)

    def between(self, rows: int) -> float:
        return interpolate(((1, 1.15), (8, 2.05), (32, 3.0), (64, 4.5)), rows)

    def plain_between(self, rows: int) -> float:
        return 0.7 + 0.01 * rows


@dataclass(frozen=True)
class BusyCoordinator(H200):
    """The same as measured under load: each session of a speculative step costs the coordinator 0.16 ms."""

    def between(self, rows: int) -> float:
        return 0.7 + 0.16 * rows

    def plain_between(self, rows: int) -> float:
        return 0.6 + 0.06 * rows


@dataclass(frozen=True)
class WithHead(H200):
    """The same with an EAGLE-3 head: drafts cost little, and the text that one lacks goes through the target again."""

    reads_states: bool = True

    def draft(self, rows: int, length: int) -> float:
        return 0.5 + 0.004 * rows + length * (0.25 + 0.002 * rows) if length else 0.0

    def between(self, rows: int) -> float:
        return 0.9 + 0.05 * rows

    def prefill(self, tokens: int) -> float:
        return 0.027 * tokens


@dataclass(frozen=True)
class SlowLinks(H200):
    """The same with links that take so long that speculation gains a fifth at most."""

    def between(self, rows: int) -> float:
        return 3.0 + 0.1 * rows


@dataclass(frozen=True)
class FewAreCheap(H200):
    """The same where one user's speculation costs next to nothing, so that little is expected of many users' either."""

    def draft(self, rows: int, length: int) -> float:
        return 0.1 + 0.3 * length * (1.0 + rows / 24) if length else 0.0

    def between(self, rows: int) -> float:
        return 0.2 + 0.06 * rows


@dataclass(frozen=True)
class TwoCores(H200):
    """A processor: times grow with tokens, and the draft is deep beside the target."""

    def target(self, rows: int, tokens: int) -> float:
        return 14.0 + 2.0 * tokens

    def draft(self, rows: int, length: int) -> float:
        return length * (3.5 + 0.5 * rows)

    def between(self, rows: int) -> float:
        return 2.0 + 0.3 * rows

    def plain_between(self, rows: int) -> float:
        return 1.2 + 0.3 * rows


@dataclass
class Load:
    """Sessions on a pair, round after round."""

    pair: H200
    acceptance: Callable[[float, int], float]
    """Acceptance of a session, by seconds and its number."""
    seed: int = 0
    noise: float = 0.03
    now: float = 0.0
    num_tokens: int = 0
    num_rounds: int = 0
    trace: list[tuple[float, int, float]] = field(default_factory=list)
    """Time, longest draft length and tokens so far after each round."""

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)
        self._num_plain_rounds = 0

    def accepted(self, number: int, length: int) -> int:
        """Draft tokens accepted of so many."""
        if not length:
            return 0
        rate = self.acceptance(self.now, number)
        return next((i for i, draw in enumerate(self._random.random(length).tolist()) if draw >= rate), length)

    def round_ms(self, rows: int, lengths: Sequence[int]) -> tuple[float, float, float]:
        """(draft, target, whole) of a round with these lengths."""
        longest, drafting = max(lengths, default=0), sum(length > 0 for length in lengths)
        draft = self._shaken(self.pair.draft(drafting, longest)) if longest else 0.0
        target = self._shaken(self.pair.target(rows, rows + sum(lengths)))
        between = self._shaken(self.pair.between(rows) if longest else self.pair.plain_between(rows))
        if longest:
            self._num_plain_rounds = 0
            return draft, target, draft + target + between
        self._num_plain_rounds += 1
        whole = max(target, between) if self._num_plain_rounds > 2 else target + between
        return 0.0, target, whole

    def note(self, milliseconds: float, tokens: int, longest: int) -> None:
        self.now += milliseconds / 1e3
        self.num_tokens += tokens
        self.num_rounds += 1
        self.trace.append((self.now, longest, float(self.num_tokens)))

    def rate(self, since: float = 0.0, until: float = float("inf")) -> float:
        """Tokens a second between these moments."""
        entries = [(0.0, 0, 0.0), *(entry for entry in self.trace if entry[0] <= until)]
        before = max(entry for entry in entries if entry[0] <= since)
        return (entries[-1][2] - before[2]) / (entries[-1][0] - before[0])

    def num_changes(self, since: float = 0.0) -> int:
        """Number of times that drafting began or ended, probes left out: for 8 rounds or more."""
        drafts = [longest > 0 for now, longest, _ in self.trace if now > since]
        runs: list[list[Any]] = []
        changes = 0
        for is_on in drafts:
            if runs and runs[-1][0] == is_on:
                runs[-1][1] += 1
            else:
                runs.append([is_on, 1])
        long_runs = [is_on for is_on, count in runs if count >= 8]
        for before, after in itertools.pairwise(long_runs):
            changes += before != after
        return changes

    def _shaken(self, milliseconds: float) -> float:
        return milliseconds * float(np.exp(self.noise * self._random.standard_normal()))


class WakingLoad(Load):
    """The same from a start at which the draft's device wakes: for a while proposals take several times as long."""

    wakes_s, slowness = 0.3, 4.0

    def round_ms(self, rows: int, lengths: Sequence[int]) -> tuple[float, float, float]:
        draft, target, whole = super().round_ms(rows, lengths)
        late = draft * (self.slowness - 1.0) if self.now < self.wakes_s else 0.0
        return draft + late, target, whole + late


class DisturbedLoad(Load):
    """The same where something else takes the processors for a while: all stages take longer until ``slow_until``."""

    slow_until, slowness = 0.0, 3.0

    def round_ms(self, rows: int, lengths: Sequence[int]) -> tuple[float, float, float]:
        slowness = self.slowness if self.now < self.slow_until else 1.0
        draft, target, whole = super().round_ms(rows, lengths)
        return slowness * draft, slowness * target, slowness * whole


def run_fixed(load: Load, num_users: int, length: int, seconds: float) -> Load:
    """All sessions with one draft length."""
    end = load.now + seconds
    while load.now < end:
        _, _, whole = load.round_ms(num_users, [length] * num_users)
        tokens = sum(load.accepted(number, length) + 1 for number in range(num_users))
        load.note(whole, tokens, length)
    return load


def report_of(rows: int, tokens: int, target_ms: float, others: tuple[int, int] = (0, 0)) -> ForwardReport:
    """Report of a target's forward; ``others``: sessions of other coordinators, and their draft tokens."""
    spent_ns = round(1e6 * target_ms)
    return ForwardReport(
        0, spent_ns, 0, spent_ns, rows, tokens, 0, num_other_rows=others[0], num_other_drafts=others[1]
    )


class Controlled:
    """A load whose lengths a controller chooses; users come and go."""

    def __init__(self, load: Load, *, max_length: int = 8, controller: DraftLengthController | None = None) -> None:
        self.load = load
        self.controller = controller or DraftLengthController(profile_of(load.pair))
        self.sessions: list[ControlledSession] = []
        self._max_length = max_length
        self._lags: dict[ControlledSession, int] = {}
        self.gained: dict[ControlledSession, int] = {}
        """Tokens of the last step."""

    def resize(self, num_users: int) -> None:
        while len(self.sessions) > num_users:
            self.controller.leave(self.sessions.pop())
        while len(self.sessions) < num_users:
            session = ControlledSession(self._max_length, reads_states=self.load.pair.reads_states)
            self.controller.enter(session)
            self.sessions.append(session)
            self._lags[session] = -1 if self.controller.will_draft(128) else 128

    def run(self, num_users: int, seconds: float) -> Load:
        self.resize(num_users)
        end = self.load.now + seconds
        while self.load.now < end:
            self.round()
        return self.load

    def round(self) -> None:
        """One step of all sessions."""
        lengths = [self.controller.length(session) for session in self.sessions]
        drafting = [session for session, length in zip(self.sessions, lengths, strict=True) if length]
        draft, target, whole = self.load.round_ms(len(self.sessions), lengths)
        whole += self._take_text(self._num_tokens_lacked(drafting))
        whole += self._take_text(self._num_text_tokens())
        self._tell(self.sessions, lengths, draft, target, self.load.now + whole / 1e3)

    def _num_tokens_lacked(self, drafting: list[ControlledSession]) -> int:
        return sum(self._lags[session] for session in drafting if self._lags[session] > 16)

    def _num_text_tokens(self) -> int:
        """Tokens of the text of drafts that catch up now."""
        fed = [session for session in self.sessions if self.controller.is_prefilling_drafts(session)]
        num_tokens = sum(self._lags[session] for session in fed)
        self._lags.update(dict.fromkeys(fed, -1))  # this step's token makes it 0
        return num_tokens

    def _take_text(self, num_tokens: int) -> float:
        """Milliseconds by which the draft's prefill of so many tokens delays the target."""
        milliseconds = self.load.pair.prefill(num_tokens)
        if num_tokens:
            self.controller.note_draft_text()
        return milliseconds

    def _tell(
        self, sessions: list[ControlledSession], lengths: list[int], draft: float, target: float, now: float
    ) -> None:
        load, controller, rows = self.load, self.controller, len(sessions)
        if max(lengths):
            controller.note_draft(sum(length > 0 for length in lengths), max(lengths), draft / 1e3)
        accepted = [load.accepted(number, length) for number, length in enumerate(lengths)]
        self.gained = {session: count + 1 for session, count in zip(sessions, accepted, strict=True)}
        load.note(1e3 * (now - load.now), sum(accepted) + rows, max(lengths))
        controller.begin(load.now)
        for session, length in zip(sessions, lengths, strict=True):
            self._lags[session] = 0 if length else self._lags[session] + 1
        for session, length, count in zip(sessions, lengths, accepted, strict=True):
            controller.add_verdict((session, length, count, self._lags[session]))
        controller.add_end(report_of(rows, rows + sum(lengths), target))
        controller.learn()
        controller.choose()


class Bursts(Controlled):
    """Requests that come together, generate equally many tokens and end one by one; the next burst comes then."""

    num_tokens = 256
    prompts_a_round = 8

    def burst(self, num_users: int) -> float:
        """Seconds until the last of so many requests has ended."""
        began = self.load.now
        self.resize(num_users)
        self._take_prompts()
        left = dict.fromkeys(self.sessions, self.num_tokens - 1)
        while self.sessions:
            self.round()
            for session, gained in self.gained.items():
                left[session] -= gained
                if left[session] <= 0:
                    self.sessions.remove(session)
                    self.controller.leave(session)
        return self.load.now - began

    def _take_prompts(self) -> None:
        """Prompts end a few at a time; sessions whose prompts have ended decode plainly beside the others'."""
        for start in range(0, len(self.sessions), self.prompts_a_round):
            done = self.sessions[: start + self.prompts_a_round]
            self._tell(done, [0] * len(done), 0.0, 8.0, self.load.now + 8e-3)


def chosen_and_plain(pair: H200, acceptance: float, *, seed: int) -> tuple[Bursts, Bursts]:
    """Bursts on the same pair, one with lengths that a controller chooses, one without drafts."""
    chosen, plain = (Bursts(Load(pair, lambda now, number: acceptance, seed=seed), max_length=most) for most in (8, 0))
    return chosen, plain


def expected_rate(pair: H200, num_users: int, length: int, acceptance: float) -> float:
    """Tokens a second of so many users with one fixed draft length, on one card, without noise."""
    between = pair.between(num_users) if length else pair.plain_between(num_users)
    forwards = pair.draft(num_users, length) + pair.target(num_users, num_users * (length + 1))
    tokens = sum(acceptance**index for index in range(length + 1))
    milliseconds = forwards + between if length else max(forwards, between)
    return 1e3 * num_users * tokens / milliseconds


class InTwoGroups(Controlled):
    """Draft and target on cards of their own: two groups of sessions, one drafting while the other is scored."""

    def __init__(self, load: Load, *, max_length: int = 8, controller: DraftLengthController | None = None) -> None:
        super().__init__(load, max_length=max_length, controller=controller)
        self._group_of: dict[ControlledSession, int] = {}
        self._ready = [0.0, 0.0]
        self._draft_free = self._target_free = 0.0

    def round(self) -> None:
        if not any(self.controller.length(session) for session in self.sessions):
            super().round()  # plain steps wait for each other
            self._ready = [self.load.now, self.load.now]
            self._draft_free = max(self._draft_free, self.load.now)
            self._target_free = self.load.now
            self._group_of.clear()
            return
        groups = self._groups()
        group = min(groups, key=self._ready.__getitem__)
        members = groups[group]
        lengths = [self.controller.length(session) for session in members]
        draft, target, _ = self.load.round_ms(len(members), lengths)
        drafting = [session for session, length in zip(members, lengths, strict=True) if length]
        self._take_text(self._num_tokens_lacked(drafting))
        drafted = max(self._ready[group], self._draft_free if max(lengths) else 0.0) + draft / 1e3
        self._draft_free = max(self._draft_free, drafted)
        scored = max(drafted, self._target_free) + target / 1e3
        self._target_free = scored
        self._ready[group] = scored + self.load.pair.between(len(members)) / 1e3
        self._tell(members, lengths, draft, target, max(self._ready[group], self.load.now))

    def _take_text(self, num_tokens: int) -> float:
        if num_tokens:
            self._draft_free = max(self._draft_free, self.load.now) + super()._take_text(num_tokens) / 1e3
        return 0.0

    def _groups(self) -> dict[int, list[ControlledSession]]:
        groups: dict[int, list[ControlledSession]] = {}
        for number, session in enumerate(self.sessions):
            groups.setdefault(self._group_of.setdefault(session, number % 2), []).append(session)
        return groups


class BurstsInTwoGroups(InTwoGroups, Bursts):
    """Bursts where draft and target have cards of their own."""


class FixedLength(DraftLengthController):
    """All sessions draft equally much in every step."""

    def __init__(self, draft_length: int) -> None:
        super().__init__()
        self._draft_length = draft_length

    def length(self, session: ControlledSession) -> int:
        return self._draft_length

    def is_prefilling_drafts(self, session: ControlledSession) -> bool:
        return False

    def choose(self) -> bool:
        return False


def fixed_rate(kind: type[Controlled], pair: H200, num_users: int, length: int, acceptance: float) -> float:
    """Tokens a second of so many users with one fixed draft length, as simulated."""
    users = kind(Load(pair, lambda now, number: acceptance, seed=7))
    users.controller = FixedLength(length)
    return users.run(num_users, 8.0 / num_users**0.5).rate(since=0.5)
