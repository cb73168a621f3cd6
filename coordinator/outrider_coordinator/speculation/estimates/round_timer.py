"""Timing of rounds: the verdicts of one message of the target, summed up, and which of these rounds say what plain and
speculative decoding take.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

from outrider.limits import MAX_DRAFT_LENGTH
from outrider_coordinator.speculation.estimates.foreign_sessions import ForeignSessions
from outrider_coordinator.speculation.estimates.step_times import StepTimes
from outrider_coordinator.speculation.mode_selector import Mode

ROUNDS_NOT_AHEAD = 2
"""Plain rounds in a row after which a target computes ahead."""
_KNOWN_ROUNDS = 4
"""Rounds of about so many rows after which their duration is known."""
_MOST = 0.5
"""Draft tokens of each foreign row, or share of all rows, from which on foreign sessions decode in the same mode."""
_WHOLE = 0.8
"""Share of the sessions above which a message is of all of them, but for some that come or go."""
_COLD_ROUNDS = 4
"""The first speculative rounds of all: they take longer than any later ones, and are not counted."""
_COLD_ROUNDS_AFTER_PROBE = 12
"""The same where a probe of many sessions told what to expect: nothing checks later what such a trial said, so it goes
on until rounds are as fast as they will be. Their forwards are not counted either.
"""
_PROMPT_FORWARDS = 9
_LEAST_PROMPT_TOKENS, _MANY_PROMPT_TOKENS = 64, 512
"""Of a forward that tells what a token takes at most, and of one that tells it well: if any did, only those count."""
_PROBED_LENGTH = 4
"""Draft length for which a probe is to tell what the target takes."""
_FEW = 0.25
"""Share of the rows up to which a plain round tells what the weights' reading takes."""
_PROBE_ROUNDS = 2
"""Rounds of a probe from which on it tells something."""
_MOST_BETWEEN = 0.5
"""Of a plain round, what may lie between the forwards as a probe tells it: rows that do not draft may wait for forwards
of those that do, which a round of all does not.
"""
_FEWER = 0.75
"""What a probe told holds down to this share of its sessions, of which some end, and up to twice as many."""
_YOUNG_ROUNDS = 24
"""Speculative rounds of all during which clocks and caches may still be cold."""
_NEWEST = 0.1


@dataclass(slots=True)
class VerdictGroup:
    """Verdicts of steps with draft tokens, or of steps without."""

    num_rows: int = 0
    num_timed: int = 0
    sum_seconds: float = 0.0

    def note(self, began: float | None, now: float) -> None:
        """One verdict of a round that began then; None: at an unknown time."""
        self.num_rows += 1
        if began is not None:
            self.num_timed += 1
            self.sum_seconds += now - began

    def add(self, num_rows: int, num_timed: int, sum_seconds: float) -> None:
        """So many verdicts at once."""
        self.num_rows += num_rows
        self.num_timed += num_timed
        self.sum_seconds += sum_seconds

    @property
    def seconds(self) -> float | None:
        """Mean round duration; None unless most rounds were timed."""
        return self.sum_seconds / self.num_timed if 2 * self.num_timed > self.num_rows else None


@dataclass(slots=True)
class VerdictBatch:
    """The verdicts of one message."""

    now: float
    plain: VerdictGroup = field(default_factory=VerdictGroup)
    drafting: VerdictGroup = field(default_factory=VerdictGroup)
    num_drafted: int = 0
    """Draft tokens of all rows."""
    draft_length: int = 0
    """Of the longest proposal."""
    num_tokens: int = 0
    """Tokens gained."""

    def note(self, began: float | None, num_drafted: int, num_accepted: int) -> None:
        """One verdict."""
        self.num_tokens += num_accepted + 1
        group = self.drafting if num_drafted else self.plain
        group.note(began, self.now)
        self.num_drafted += num_drafted
        self.draft_length = max(self.draft_length, num_drafted)

    def add_plain(self, num_rows: int, num_timed: int, sum_seconds: float) -> None:
        """Verdicts of steps without draft tokens, of which so many were timed, and the sum of those times."""
        self.num_tokens += num_rows
        self.plain.add(num_rows, num_timed, sum_seconds)

    @property
    def num_rows(self) -> int:
        """Verdicts."""
        return self.plain.num_rows + self.drafting.num_rows

    @property
    def is_mixed(self) -> bool:
        """Whether some sessions drafted and others did not."""
        return bool(self.plain.num_rows and self.drafting.num_rows)


@dataclass(frozen=True, slots=True)
class _ProbeRound:
    """A round in which a few of many sessions drafted."""

    num_sessions: int
    """All of them."""
    draft_length: int
    """Of the longest proposal."""
    num_drafted: int
    drafting_s: float
    between_s: float
    """What lay between the forwards; infinity where the round did not tell."""


class RoundTimer:
    """Durations of rounds, and the share of the sessions that are in one forward together."""

    def __init__(self) -> None:
        self.times = StepTimes()
        self.share = 1.0
        """Of a speculative round: 1 unless sessions stand in groups that take turns, as where the draft has a device of
        its own. Plain steps wait for each other. The first rounds count in full: taken for 1 until many were seen, it
        would make speculation seem slower than it is.
        """
        self.foreign = ForeignSessions()
        self._num_plain_rounds = self._num_speculative_rounds = self._num_shares = 0
        self._prompt_token_s: dict[bool, deque[float]] = {
            is_many: deque(maxlen=_PROMPT_FORWARDS) for is_many in (False, True)
        }
        """Seconds a token of the latest forwards that computed prompts; those of many tokens apart."""
        self._proposals: tuple[int, int, float] | None = None
        """Of the probe's round under way: the longest one's length, the draft tokens of all, seconds."""
        self._probe_rounds: list[_ProbeRound] = []
        """Of the probe under way."""
        self._probed: set[int] = set()
        """Numbers of sessions of which probes told something."""

    def note(
        self, batch: VerdictBatch, num_sessions: int, *, rows: int, tokens: int, seconds: float, is_settled: bool
    ) -> bool:
        """Time one message; returns whether it was a speculative round of known duration. Rounds count as those of all
        sessions, foreign ones too, and only while these decode in the same mode.

        ``num_sessions`` are those whose prompts are computed; ``rows``, ``tokens`` and ``seconds`` are the forward's;
        ``is_settled``: nearly all sessions that are to draft do.
        """
        if not batch.drafting.num_rows:
            self._note_plain(batch, num_sessions, rows, tokens)
            self._note_prompts(rows, tokens, seconds)
            return False
        self._num_plain_rounds = 0
        others = rows - batch.num_rows if self.foreign.num_sessions else 0
        others_drafted = tokens - rows - batch.num_drafted
        is_decode = rows == batch.num_rows + others and 0 <= others_drafted <= MAX_DRAFT_LENGTH * others
        if is_decode and seconds > 0.0 and not self.is_cold(num_sessions):
            self.times.note_target(rows, tokens, seconds)
        duration = batch.drafting.seconds
        if duration is None or not is_settled or (rows and not is_decode):
            return False
        if others and others_drafted < _MOST * others:
            return False
        self._num_speculative_rounds += 1
        if self._num_speculative_rounds <= self._most_cold_rounds(num_sessions):
            return False
        self._note_share(batch, num_sessions)
        load_ratio = self.foreign.load_ratio(num_sessions)
        theirs = others_drafted / others if others else batch.num_drafted / batch.num_rows
        drafted = batch.num_drafted + round(theirs * (load_ratio - 1.0) * batch.num_rows)
        longest = max(batch.draft_length, round(theirs))
        self.times.note_speculative(round(load_ratio * batch.num_rows), longest, drafted, duration)
        return True

    def _note_plain(self, batch: VerdictBatch, num_sessions: int, rows: int, tokens: int) -> None:
        self._num_plain_rounds += 1
        if batch.num_rows < _WHOLE * num_sessions:
            self._num_plain_rounds = 0  # sessions stand in groups, as after a probe, and will merge
        load_ratio = self.foreign.load_ratio(num_sessions)
        if load_ratio == 1.0 and tokens > rows:
            self._num_plain_rounds = 0  # a part of a prompt was computed beside it
        if self._num_plain_rounds <= ROUNDS_NOT_AHEAD or not batch.plain.seconds:
            return
        if load_ratio == 1.0 or rows == tokens >= _MOST * load_ratio * batch.num_rows:
            self.times.note_plain(round(load_ratio * batch.num_rows), batch.plain.seconds)

    def _note_prompts(self, rows: int, tokens: int, seconds: float) -> None:
        """A token of a draft costs the target at most what one of a prompt does: many share the weights' reading."""
        if tokens - rows >= _LEAST_PROMPT_TOKENS and seconds > 0.0:
            self._prompt_token_s[tokens >= _MANY_PROMPT_TOKENS].append(seconds / tokens)

    def note_proposals(self, draft_length: int, tokens: int, seconds: float) -> None:
        """Proposals of a probe of many sessions, whose round is under way."""
        self._proposals = draft_length, tokens, seconds

    def note_probe(self, batch: VerdictBatch, num_sessions: int, seconds: float) -> None:
        """A round in which a few of many sessions drafted; ``seconds``: of the target's forward.

        The first rounds of a process take several times as long, in all stages alike: how much, the forward tells
        beside a plain one. A few more tokens say nothing of what one costs, so prompts have to: together with the rows
        they take what as many of a prompt do, less the reading of the weights, for which a plain round pays already.
        What that takes a round of few rows tells, which reads little else.
        """
        proposals, plain_s = self._proposals, self.plain_seconds(num_sessions)
        self._num_plain_rounds, self._proposals = 0, None
        if proposals is None or not self._has_prompts or plain_s <= 0.0:
            return
        draft_length, num_drafted, drafting_s = proposals
        # A forward of the sessions that draft alone, as in the second round, takes hardly less than one of all.
        slowness = max(seconds / (plain_s + self._prompt_token * batch.num_drafted), 1.0)
        whole_s = batch.plain.seconds if batch.num_rows >= _WHOLE * num_sessions else None
        between_s = max(whole_s - seconds - drafting_s, 0.0) if whole_s else math.inf
        self._probe_rounds.append(
            _ProbeRound(num_sessions, draft_length, num_drafted, drafting_s / slowness, between_s / slowness)
        )

    @property
    def _has_prompts(self) -> bool:
        """Whether any forward told what a token of a prompt takes."""
        return any(self._prompt_token_s.values())

    @property
    def _prompt_token(self) -> float:
        """Seconds that a token of a prompt takes; a forward that was computed ahead may seem to take no time."""
        return statistics.median(self._prompt_token_s[True] or self._prompt_token_s[False])

    def end_probe(self) -> bool:
        """Whether the probe under way, which has ended if there was one, told something of speculation by all sessions.

        Of its rounds the quickest counts, stage by stage: whatever else happens beside one only makes it longer.
        """
        rounds, self._probe_rounds = self._probe_rounds, []
        if len(rounds) < _PROBE_ROUNDS:
            return False
        num_sessions = rounds[-1].num_sessions
        plain_s = self.plain_seconds(num_sessions)
        most = _PROBED_LENGTH * num_sessions
        weights_s = self.times.plain_of_few(num_sessions * _FEW)
        more_s = self._prompt_token * (num_sessions + most) - weights_s if weights_s else self._prompt_token * most
        quickest = min(rounds, key=lambda each: each.drafting_s / max(each.draft_length, 1))
        between_s = min(each.between_s for each in rounds)
        for _ in range(_PROBE_ROUNDS):
            self.times.note_draft(quickest.draft_length, quickest.num_drafted, quickest.drafting_s)
            self.times.note_target(num_sessions, num_sessions, plain_s)
            self.times.note_target(num_sessions, num_sessions + most, plain_s + max(more_s, 0.0))
            if math.isfinite(between_s):
                self.times.note_between(num_sessions, min(between_s, _MOST_BETWEEN * plain_s))
        self._probed.add(num_sessions)
        return True

    def knows_probed(self, num_sessions: int) -> bool:
        """Whether probes told what may be expected of speculation by about so many sessions."""
        return any(_FEWER * probed <= num_sessions < 2 * probed for probed in self._probed)

    def learns_from_probes(self, num_sessions: int) -> bool:
        """Whether speculation by about so many sessions was never timed, so that probes are all that tells of it."""
        is_told = self._has_prompts and not self.foreign.num_sessions
        return is_told and not self.knows(Mode.SPECULATIVE, num_sessions)

    def is_cold(self, num_sessions: int) -> bool:
        """Whether forwards of so many sessions' speculation are slow and not counted, since probes tell more."""
        return self.knows_probed(num_sessions) and self._num_speculative_rounds < _COLD_ROUNDS_AFTER_PROBE

    def _most_cold_rounds(self, num_sessions: int) -> int:
        return _COLD_ROUNDS_AFTER_PROBE if self.knows_probed(num_sessions) else _COLD_ROUNDS

    def forget_speculation(self, num_sessions: int) -> None:
        """Time speculative rounds of about so many sessions anew. What probes told stays where there were no others:
        nothing better is known.
        """
        if self._num_speculative_rounds:
            self.times.forget_speculation(self.share * self.num_all(num_sessions))
            self._probed.clear()

    def interrupt(self) -> None:
        """Prompts are computed meanwhile: a target begins anew to compute ahead."""
        self._num_plain_rounds = 0

    def _note_share(self, batch: VerdictBatch, num_sessions: int) -> None:
        if num_sessions < 2:
            return  # it has no other to stand in a group with
        share = min(1.0, batch.num_rows / num_sessions)
        self._num_shares += 1
        self.share += max(_NEWEST, 1.0 / self._num_shares) * (share - self.share)

    @property
    def knows_share(self) -> bool:
        """Whether rounds of several sessions told ``share``."""
        return self._num_shares > 0

    def knows(self, mode: Mode, num_sessions: int) -> bool:
        """Whether rounds of this mode and of about so many sessions were timed."""
        if mode is Mode.PLAIN:
            return self.times.num_plain(self.num_all(num_sessions)) >= _KNOWN_ROUNDS
        return self.times.num_speculative(self.share * self.num_all(num_sessions)) >= _KNOWN_ROUNDS

    def doublings_past_known(self, num_sessions: int) -> int | None:
        """How many times sessions have doubled since those with which speculation is known; None: it is not at all."""
        rows = self.share * self.num_all(num_sessions)
        return self.times.doublings_past_speculation(rows, least_rounds=_KNOWN_ROUNDS)

    @property
    def is_young(self) -> bool:
        """Whether nothing is known of speculation, or only what its first rounds of all took, which may mislead."""
        return self._num_speculative_rounds < _YOUNG_ROUNDS

    def num_cold_rounds(self, num_sessions: int) -> int:
        """Speculative rounds of so many sessions to come that are not counted."""
        return max(self._most_cold_rounds(num_sessions) - self._num_speculative_rounds, 0)

    def plain_seconds(self, num_sessions: int) -> float:
        """Expected duration of a plain round."""
        return self.times.plain(self.num_all(num_sessions))

    def num_all(self, num_sessions: int) -> float:
        """So many own sessions, and the foreign ones."""
        return num_sessions + self.foreign.num_sessions

    def share_of_all(self, num_sessions: int) -> float:
        """Rows of a speculative round over the own sessions: ``share``, with foreign rows above 1."""
        return self.share * self.foreign.load_ratio(num_sessions)
