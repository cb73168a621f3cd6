"""Token budget: tokens of each job in the next forward, the size of prompts' chunks, and when a chunk waits.

A forward's time grows with its tokens, so a budget bounds how long a running session waits for a neighbour's prefill:
beside running sessions a smaller one than alone, also while these are away for a moment. An eighth of the whole is kept
for prefills whenever there are any, so that running sessions cannot starve them either. Links share that equally: each
stands for a target or a coordinator. Of a link's prompts the shortest goes first: equal shares would end all of them at
the end of the last.

Plain Python over lengths and times: knows no sequences, no devices and no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.serving.session import SessionKey

DEFAULT_MAX_BATCHED_TOKENS = 1024
"""Tokens of a forward on a CPU, where more delay the answers of running sessions."""
DEFAULT_MIXED_PREFILL_TOKENS = 256
"""Prefill tokens that cost little more on a GPU: the weights are being read anyway."""
_FEW_TOKENS = 8
"""A job with fewer tokens than this besides its last ones is running rather than prefilling."""
_MIN_CHUNK = 16
"""Prefills are not cut smaller than this to serve one more of them in a forward."""
_PREFILL_SHARE = 8
"""Part of a forward (1 / 8) that is kept for new prompts, so that long ones do not hold them up."""

_CHUNK_WEIGHT = 0.25
"""The weight of the newest forward in the figures that chunk sizes follow from."""
_MOST_MORE = 0.9
"""A forward with a chunk may take so much longer, of what one without takes."""
_LEAST_CHUNK = 4
"""A chunk is never smaller than the largest by more than this factor: prompts get on, however long."""
_CHUNK_STEP = 16
"""Chunk sizes are multiples of it."""
_SESSIONS_STEP = 32
"""Forwards of numbers of running sessions that differ by less take about the same time."""
_PROMPT_WEIGHT = 8
"""A prompt that waits behind another counts as this many running sessions: its user has seen nothing yet."""
_MOST_OF_MANY = 4
"""Largest factor of a forward's tokens while many prompts wait: on an H200 forwards of more than 1,024 tokens compute
prompts no faster, a few more than 1,024 take up to a quarter longer for each, and CUDA graphs hold no more."""

_DELAY_WEIGHT = 0.2
"""The weight of the newest absence, and of the newest chunk, in the figures that delays follow from."""
_LATE = 1.5
"""A session that is away for this many times longer than usual is not waited for."""
_GATHERED_RATIO = 0.85
"""Running sessions are gathered where a step of all takes at most so much of the time of two groups taking turns: more
sessions' drafts take longer, and on one GPU those of a group hide behind the forward of the other."""
LONGEST_ABSENCE_NS = 100_000_000
"""A session that is away for longer was held up by something else, and is neither waited for nor counted."""


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """Limits on the number of tokens of a forward."""

    max_batched_tokens: int = DEFAULT_MAX_BATCHED_TOKENS
    max_mixed_prefill_tokens: int = DEFAULT_MIXED_PREFILL_TOKENS
    """Prompt tokens beside running sessions, at most."""
    adapts_chunks: bool = False
    """Cut chunks smaller where forwards say that running sessions would wait too long. For devices on which a chunk's
    time is not its tokens' alone, as on a GPU."""


class Job(Protocol):
    """Tokens waiting to be appended to one sequence."""

    @property
    def num_left(self) -> int:
        """Number of tokens left to compute, at least one."""
        ...

    @property
    def num_last(self) -> int:
        """Number of final tokens that must go through one forward together, from 1 to ``num_left``."""
        ...


def is_running(job: Job) -> bool:
    """True if a job belongs to a session that runs, rather than to one whose prompt is being taken in."""
    return job.num_left - job.num_last < _FEW_TOKENS


def share_tokens(
    jobs: Sequence[Job],
    max_tokens: int,
    *,
    max_prefill: int = DEFAULT_MIXED_PREFILL_TOKENS,
    is_mixed: bool = False,
    rebuilds: Sequence[int] = (),
    links: Sequence[int] = (),
) -> list[int]:
    """Number of tokens of each job in the next forward; at least one job is served.

    ``jobs`` stand in the order in which they were last served, longest ago first; a job that gets nothing now stands
    nearer to the front next time. A single job may pass the budget with its last tokens, which cannot be cut.
    ``max_prefill`` is the most that prefills get of a forward in which running sessions are served too, or for which
    such sessions will have to wait: ``is_mixed``. ``rebuilds`` are the prefills of sessions that were lost: each gets
    all it can use before the next one does. New prompts get what they leave, and an eighth at least. ``links``: that of
    each job; empty: one for all.
    """
    shares = [0] * len(jobs)
    running, prefills = list[int](), list[int]()
    for index, job in enumerate(jobs):
        (running if is_running(job) else prefills).append(index)
    kept = max(1, max_tokens // _PREFILL_SHARE) if prefills else 0
    left = max_tokens - kept
    for index in running:
        wanted = jobs[index].num_left
        if wanted <= left or not any(shares):
            shares[index] = wanted
            left -= wanted
    room = max(left + kept, int(bool(prefills)))  # one token even beside a row that passed the budget alone
    room = min(room, max_prefill) if is_mixed or any(shares) else room
    new = [index for index in prefills if index not in rebuilds]
    kept = room // _PREFILL_SHARE if new else 0
    for index in rebuilds:
        if room > kept:
            shares[index] = _chunk(jobs[index], room - kept)
            room -= shares[index]
    _share_among_links(jobs, new, room, shares, links)
    return shares


def _share_among_links(
    jobs: Sequence[Job], prefills: Sequence[int], room: int, shares: list[int], links: Sequence[int]
) -> None:
    """An equal part for each link; what one leaves goes to the others. Where the parts would be too small, the links
    that were served longest ago get one.
    """
    own: dict[int, list[int]] = {}
    for index in prefills:
        own.setdefault(links[index] if links else 0, []).append(index)
    parts = list(own.values())[: max(1, room // _MIN_CHUNK)]
    parts.sort(key=lambda part: sum([jobs[index].num_left for index in part]))
    for num_links, part in zip(range(len(parts), 0, -1), parts, strict=True):
        _share_among_prefills(jobs, part, room // num_links, shares)
        room -= sum([shares[index] for index in part])


def _share_among_prefills(jobs: Sequence[Job], prefills: Sequence[int], left: int, shares: list[int]) -> None:
    """The shortest first; an eighth is kept for the one that was served longest ago, so that none starves."""
    if left < 1 or not prefills:
        return
    oldest = prefills[0]
    shares[oldest] = _chunk(jobs[oldest], min(left, max(_MIN_CHUNK, left // _PREFILL_SHARE)))
    left -= shares[oldest]
    for index in sorted(prefills, key=lambda index: jobs[index].num_left):
        if not shares[index] and left < min(_MIN_CHUNK, jobs[index].num_left):
            continue
        share = _chunk(jobs[index], shares[index] + left)
        left -= share - shares[index]
        shares[index] = share


def _chunk(job: Job, share: int) -> int:
    return job.num_left if share >= job.num_left else min(share, job.num_left - job.num_last)


class PrefillChunkSize:
    """The largest chunk of prompts beside running sessions, which wait for the forward that it is part of.

    A chunk's time grows with its tokens and, through attention, with all that stands before them, so no fixed size is
    right for short prompts and long ones. What forwards without and with a chunk took tells how many tokens keep the
    wait within bounds. Where more prompts wait than sessions run, more users gain by larger chunks than lose. Times are
    in nanoseconds of one clock.
    """

    def __init__(self, most: int) -> None:
        """``most`` tokens, where forwards bear it and few prompts wait."""
        self._most = most
        self._least = max(1, most // _LEAST_CHUNK)
        self._without_ns: dict[int, float] = {}
        """Recent time of a forward without a chunk, by the class of its running sessions: while prompts wait
        there is none, and sessions become many."""
        self._a_token_ns: float | None = None

    def note_forward(self, duration_ns: int, num_chunk_tokens: int, num_running: int) -> None:
        """A forward that served running sessions took so long, with this many tokens of prompts beside them."""
        if not num_chunk_tokens:
            size = _class_of(num_running)
            self._without_ns[size] = moving_mean(self._without_ns.get(size), duration_ns, _CHUNK_WEIGHT)
        elif (without_ns := self.forward_ns(num_running)) is not None:
            more_ns = max(0.0, duration_ns - without_ns)
            self._a_token_ns = moving_mean(self._a_token_ns, more_ns / num_chunk_tokens, _CHUNK_WEIGHT)

    def note_end_of_prompts(self) -> None:
        """The next one begins at its beginning, where tokens cost least."""
        self._a_token_ns = None

    def tokens(self, num_running: int, num_prompts: int, num_decode_tokens: int = 0) -> int:
        """Maximum size of the next chunk beside the running sessions, with ``num_prompts`` due, in a forward with this
        number of other tokens.
        """
        few = self._of_few(num_running)
        many = few * min(_PROMPT_WEIGHT * (num_prompts - 1) / max(num_running, 1), _MOST_OF_MANY)
        return max(few, min(int(many), _MOST_OF_MANY * self._most - num_decode_tokens))

    def _of_few(self, num_running: int) -> int:
        without_ns = self.forward_ns(num_running)
        if without_ns is None or not self._a_token_ns:
            return self._most
        fitting = int(_MOST_MORE * without_ns / self._a_token_ns)
        return min(self._most, max(self._least, fitting // _CHUNK_STEP * _CHUNK_STEP))

    def forward_ns(self, num_running: int) -> float | None:
        """Time of a forward of this number of sessions without a chunk, or of the nearest known number."""
        size = _class_of(num_running)
        nearest = min(self._without_ns, key=lambda known: abs(known - size), default=None)
        return None if nearest is None else self._without_ns[nearest]


def _class_of(num_sessions: int) -> int:
    """Class of numbers of sessions by whose forwards' times others are estimated: powers of two, and then steps."""
    few = _SESSIONS_STEP.bit_length() - 1
    return num_sessions.bit_length() if num_sessions < _SESSIONS_STEP else few + num_sessions // _SESSIONS_STEP


class PrefillDelayPolicy:
    """Decision whether a prompt's chunk, or running sessions that are due, wait for those that will soon be back.

    A running session is away between its answer and its next item. A chunk that starts meanwhile makes it wait for a
    whole forward, and then for its own; one that waits is served beside it in the same. So a chunk waits where it would
    not be done before they are back, by what was seen of both lately. Times are in nanoseconds of one clock.
    """

    def __init__(self) -> None:
        self._noted: list[tuple[SessionKey, int, bool]] = []
        """Answers and returns (True) that nothing has been learned from: that waits until something depends on it."""
        self._left: dict[SessionKey, int] = {}  # when each of those away was answered
        self._away_ns: float | None = None
        self._chunk_ns: float | None = None

    def note_answer(self, key: SessionKey, now_ns: int) -> None:
        """A running session was answered."""
        self._noted.append((key, now_ns, False))

    def note_return(self, key: SessionKey, now_ns: int) -> None:
        """A session has sent its next item."""
        self._noted.append((key, now_ns, True))

    def learn(self) -> None:
        """Process what was noted; any time, best while the device computes."""
        noted, self._noted = self._noted, []
        for key, now_ns, is_return in noted:
            if is_return:
                self._learn_return(key, now_ns)
            else:
                self._left[key] = now_ns

    def _learn_return(self, key: SessionKey, now_ns: int) -> None:
        left = self._left.pop(key, None)
        # A session that asks for something else before it was answered comes before it left.
        if left is not None and 0 <= now_ns - left <= LONGEST_ABSENCE_NS:
            self._away_ns = moving_mean(self._away_ns, now_ns - left, _DELAY_WEIGHT)

    def note_end(self, key: SessionKey) -> None:
        """A session will not be back."""
        self.learn()
        self._left.pop(key, None)

    def drop_link(self, link_id: int) -> None:
        """None of a link's sessions will be back."""
        self.learn()
        self._left = {key: left for key, left in self._left.items() if key[0] != link_id}

    def note_chunk(self, duration_ns: int) -> None:
        """A forward with a prompt's chunk took so long."""
        self._chunk_ns = moving_mean(self._chunk_ns, duration_ns, _DELAY_WEIGHT)

    def wait_ns(self, now_ns: int) -> int:
        """Nanoseconds that a chunk should wait unless a session is back before; 0: it may go."""
        lefts, away_ns = self._awaited(now_ns)
        if not lefts or self._chunk_ns is None or now_ns + self._chunk_ns <= min(lefts) + away_ns:
            return 0
        return int(max(lefts) + _patience_ns(away_ns)) - now_ns

    def gather_ns(self, due: Collection[SessionKey], forward_ns: Callable[[int], float | None], now_ns: int) -> int:
        """Nanoseconds that running sessions that are due should wait for those away, to share a forward with them from
        now on; 0: they may go. ``forward_ns``: time of a forward of a number of sessions, if known.

        Sessions that are served while others draft take turns with these for good, each a whole forward behind. One
        group waits for its drafts instead, which takes less where a forward's time hardly grows with its sessions.
        """
        lefts, away_ns = self._awaited(now_ns, due)
        if not lefts:
            return 0
        ours, theirs, of_all = map(forward_ns, (len(due), len(lefts), len(due) + len(lefts)))
        if ours is None or theirs is None or of_all is None:
            return 0
        if of_all + away_ns > _GATHERED_RATIO * (ours + theirs):
            return 0
        return int(max(lefts) + _patience_ns(away_ns)) - now_ns

    def _awaited(self, now_ns: int, due: Collection[SessionKey] = ()) -> tuple[list[int], float]:
        """Times at which the sessions left that are away, not ``due`` and not late, and how long one is away."""
        self.learn()
        if (away_ns := self._away_ns) is None:
            return [], 0.0
        patience_ns = _patience_ns(away_ns)
        lefts = [left for key, left in self._left.items() if key not in due and now_ns - left < patience_ns]
        return lefts, away_ns


def _patience_ns(away_ns: float) -> float:
    """Longest absence of a session that is waited for, where one usually takes so long."""
    return min(_LATE * away_ns, LONGEST_ABSENCE_NS)


def moving_mean(mean: float | None, value: float, weight: float) -> float:
    """The mean once ``value`` was seen, which counts for ``weight`` of it; of none before, the value."""
    return value if mean is None else mean + weight * (value - mean)
