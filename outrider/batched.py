"""Batches: items of many sessions as arrays, one array for each field, of a decode batch.

A value for each session and step takes several times as long to make as an array for each field of all. Both ports take
and give arrays beside single items. Knows no bytes: those are ``outrider.transport.convert``'s.

Shape letters: ``B`` sessions, ``T`` tokens of all of them, ``N`` ids of all supports.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from outrider.packed_ids import MIN_PACKED_IDS, unpack_long
from outrider.planes import PlaneReference
from outrider.ports import Extend, ItemTiming, Proposal, Score, Scores
from outrider.prefix_hash import BLOCK_TOKENS, CHAIN_BYTES, PrefixHash, chain_size
from outrider.types import (
    STATE_BYTES,
    CandidateLogprobs,
    HiddenStates,
    SparseEvidence,
    SparseScores,
    Support,
    TokenScores,
)
from outrider.values import step_value

Column = NDArray[Any]
U8, U4, I4, F4 = np.dtype("<u8"), np.dtype("<u4"), np.dtype("<i4"), np.dtype("<f4")
U1 = np.dtype("u1")
"""Types that arrays travel in: one that is made in its type is not converted. Made once, since to read a type from its
name takes as long as to read a column."""
MAX_ROW_TOKENS = 64
"""Committed tokens of a step. More are a prompt."""
NUMBERS_IN_A_TIMING = len(ItemTiming.__slots__)
_NO_PROBS = np.zeros(0, dtype=np.float32)
EventT_co = TypeVar("EventT_co", covariant=True)


@step_value(frozen=True, slots=True)
class StateBatch:
    """Hidden states of sessions that differ, each by one reference to the same plane, or fetched."""

    plane_id: bytes
    width: int
    """F: layers times the model's hidden size."""
    dtype: str
    starts: Column  # [B] first position of each
    counts: Column  # [B] positions of each, at least one
    offsets_bytes: Column  # [B] uint64, in the plane's ring
    sequences: Column  # [B] uint64, as in ``PlaneReference``
    tensor: Any = None
    """[M, F] on the reader's device, once it has fetched them. Never travels."""
    firsts: Column | None = None  # [B] int64
    """First row of each in ``tensor``; None: they are all of it, one after the other."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one position."""
        return self.width * STATE_BYTES[self.dtype]

    def selected(self, indices: Any) -> StateBatch:  # noqa: ANN401 - indices or a slice
        """Sessions at these indices, not fetched."""
        return StateBatch(
            self.plane_id,
            self.width,
            self.dtype,
            self.starts[indices],
            self.counts[indices],
            self.offsets_bytes[indices],
            self.sequences[indices],
        )

    def hidden_states(self) -> Iterator[HiddenStates]:
        """Hidden states of each session."""
        lists = self.starts.tolist(), self.counts.tolist(), self.offsets_bytes.tolist(), self.sequences.tolist()
        firsts = (self.counts.cumsum() - self.counts if self.firsts is None else self.firsts).tolist()
        for first, start, count, offset, sequence in zip(firsts, *lists, strict=True):
            reference = PlaneReference(self.plane_id, offset, count * self.row_bytes, sequence)
            own = None if self.tensor is None else self.tensor[first : first + count]
            references = (reference,) if own is None else ()
            yield HiddenStates(start, count, self.width, self.dtype, b"", references, own)

    def indices(self) -> Column | None:  # [sum(counts)]
        """Row of ``tensor`` for each position, one session after the other; None: they lie so."""
        if self.firsts is None:
            return None
        ends = self.counts.cumsum()
        return np.repeat(self.firsts - (ends - self.counts), self.counts) + np.arange(int(ends[-1]))

    @staticmethod
    def form_of(states: HiddenStates) -> tuple[object, ...] | None:
        """Properties that the states of a step share to be arrays; None for states that are not by one reference."""
        if len(states.references) != 1 or not states.num_rows or states.tensor is not None:
            return None
        return states.references[0].plane_id, states.width, states.dtype

    @classmethod
    def of(cls, states: Sequence[HiddenStates]) -> StateBatch:
        """States whose ``form_of`` is the same."""
        references = [each.references[0] for each in states]
        return cls(
            references[0].plane_id,
            states[0].width,
            states[0].dtype,
            np.array([each.start for each in states], dtype=np.int64),
            np.array([each.num_rows for each in states], dtype=np.int64),
            np.array([each.offset_bytes for each in references], dtype=np.uint64),
            np.array([each.sequence for each in references], dtype=np.uint64),
        )


@step_value(frozen=True, slots=True)
class SupportBatch:
    """Supports in the answers of sampled sessions, one after the other."""

    counts: Column
    """Proposals: [T] int32, ids in the support of each draft token. Scores: [B] uint32, probabilities of each."""
    token_ids: Column  # [N] int32, of proposals; scores have none
    probs: Column  # [N] float32


@step_value(frozen=True, slots=True)
class LogprobBatch:
    """Logprobs of the candidates at the scored positions of sessions, one position after the other."""

    num_positions: Column  # [B] uint32, 0 for a session without logprobs
    counts: Column  # [P] uint32, candidates of each position
    token_ids: Column  # [C] int32
    logprobs: Column  # [C] float32
    ranks: Column  # [C] int32
    top_counts: Column  # [P] uint32
    top_token_ids: Column  # [N] int32
    top_logprobs: Column  # [N] float32

    @classmethod
    def of(cls, rows: Sequence[Sequence[CandidateLogprobs]]) -> LogprobBatch | None:
        """Logprobs of each session; None if no session has any."""
        positions = [position for row in rows for position in row]
        if not positions:
            return None
        columns = zip(*[(each.token_ids, each.logprobs, each.ranks, each.top_token_ids, each.top_logprobs)
                        for each in positions], strict=True)  # fmt: skip
        ids, logprobs, ranks, top_ids, top_logprobs = [np.concatenate(column) for column in columns]
        return cls(
            np.array([len(row) for row in rows], dtype=U4),
            np.array([each.token_ids.size for each in positions], dtype=U4),
            ids,
            logprobs,
            ranks,
            np.array([each.top_token_ids.size for each in positions], dtype=U4),
            top_ids,
            top_logprobs,
        )

    @classmethod
    def nothing(cls, size: int) -> LogprobBatch:
        """Batch of sessions without logprobs."""
        return cls(np.zeros(size, dtype=U4), *[np.zeros(0, dtype=dtype) for dtype in (U4, I4, F4, I4, U4, I4, F4)])

    @classmethod
    def joined(cls, parts: Sequence[LogprobBatch]) -> LogprobBatch:
        """Columns of several, one after the other."""
        return cls(*[np.concatenate([getattr(part, name) for part in parts]) for name in cls.__slots__])

    def selected(self, indices: NDArray[np.intp]) -> LogprobBatch:
        """Columns of the sessions at these indices."""
        positions = ragged(self.num_positions, indices)
        own, top = ragged(self.counts, positions), ragged(self.top_counts, positions)
        return LogprobBatch(
            self.num_positions[indices],
            self.counts[positions],
            self.token_ids[own],
            self.logprobs[own],
            self.ranks[own],
            self.top_counts[positions],
            self.top_token_ids[top],
            self.top_logprobs[top],
        )

    def rows(self) -> list[tuple[CandidateLogprobs, ...]]:
        """Candidates at the positions of each session."""
        own = itertools.pairwise(_edges(self.counts))
        tops = itertools.pairwise(_edges(self.top_counts))
        positions = iter([
            CandidateLogprobs(
                self.token_ids[first:last], self.logprobs[first:last], self.ranks[first:last],
                self.top_token_ids[start:stop], self.top_logprobs[start:stop],
            )
            for (first, last), (start, stop) in zip(own, tops, strict=True)
        ])  # fmt: skip
        return [tuple(itertools.islice(positions, count)) for count in self.num_positions.tolist()]


@step_value(frozen=True, slots=True)
class AnswerBatch(Generic[EventT_co]):
    """Proposals or scores of sessions that differ: tokens, or what ``SparseEvidence`` and ``SparseScores`` hold."""

    sessions: Column  # [B] uint64
    generations: Column  # [B] uint64
    base_lengths: Column  # [B] uint32
    counts: Column  # [B] uint32, tokens of each
    token_ids: Column  # [T] uint32
    timings_ns: Sequence[int]  # [6 B] the fields of ``ItemTiming``; [6]: the same for all; []: not known
    make: Callable[[int, int, int, tuple[int, ...]], EventT_co]
    """The event of session, generation, base length and tokens; not for sparse scores."""
    outside_masses: Column | None = None  # [T] float32
    """Probability mass outside of ``SparseScores``; ``token_ids`` are then int32, and may be -1. None: other answers.
    """
    states: StateBatch | None = None
    """Hidden states of scores, if they were asked for."""
    supports: SupportBatch | None = None
    """Supports of proposals with evidence, or of sparse scores of these; None: there are none."""
    channel: int = 0
    """Proposal channel. Of proposals: the proposal channel by which they are to go, or have gone, to the target too. Of
    scores: the one by which their draft tokens came, until the verdicts have left by it. 0: none."""
    draft_token_ids: Column | None = None  # [T - B] uint32
    """Draft tokens that were scored, if they came by a proposal channel."""
    goes_on: Column | None = None  # [B] uint8
    """1 for scores after which the target begins the next step by itself; None: there are none."""
    details: Mapping[str, Sequence[Any]] | None = None
    """Fields of the events that arrays do not hold, by name, a value for each answer. Their readers take events."""
    logprobs: LogprobBatch | None = None
    """Logprobs of scores, if any session asks for them."""

    @property
    def is_sparse(self) -> bool:
        """True if the answers hold more than tokens."""
        return self.outside_masses is not None or self.supports is not None

    @property
    def unsigned_ids(self) -> Column:  # [T] uint32
        """Token ids, of which a negative one is high."""
        return self.token_ids.view(U4) if self.token_ids.dtype == I4 else self.token_ids

    @property
    def channel_key(self) -> bytes:
        """Names proposals on their channel: by sessions and generations."""
        return _channel_key(self.sessions, self.generations)

    def selected(self, indices: NDArray[np.intp]) -> AnswerBatch[EventT_co]:
        """The answers at these indices."""
        tokens, supports = ragged(self.counts, indices), self.supports
        if supports is not None:
            if self.outside_masses is None:
                ids = ragged(supports.counts, tokens)
                supports = SupportBatch(supports.counts[tokens], supports.token_ids[ids], supports.probs[ids])
            else:
                ids = ragged(supports.counts, indices)
                supports = SupportBatch(supports.counts[indices], supports.token_ids, supports.probs[ids])
        return AnswerBatch(
            self.sessions[indices],
            self.generations[indices],
            self.base_lengths[indices],
            self.counts[indices],
            self.token_ids[tokens],
            self._timings_at(indices),
            self.make,
            None if self.outside_masses is None else self.outside_masses[tokens],
            None if self.states is None else self.states.selected(indices),
            supports,
            0,
            None if self.draft_token_ids is None else self.draft_token_ids[ragged(self.counts - 1, indices)],
            None if self.goes_on is None else self.goes_on[indices],
            self.details and {name: [values[place] for place in indices] for name, values in self.details.items()},
            None if self.logprobs is None else self.logprobs.selected(indices),
        )

    def _timings_at(self, indices: NDArray[np.intp]) -> Sequence[int]:
        if len(self.timings_ns) <= NUMBERS_IN_A_TIMING:
            return self.timings_ns
        rows = np.array(self.timings_ns, dtype=U8).reshape(-1, NUMBERS_IN_A_TIMING)
        numbers: list[int] = rows[indices].ravel().tolist()
        return numbers

    def events(self, indices: Sequence[int]) -> Iterator[EventT_co]:
        """The answers at these indices, one by one."""
        details = dict(self.details or {})
        if self.draft_token_ids is not None:
            details["draft_token_ids"] = list(_rows(self.counts - 1, self.draft_token_ids))
        if self.goes_on is not None:
            details["goes_on"] = list(map(bool, self.goes_on.tolist()))
        if self.logprobs is not None:
            details["logprobs"] = self.logprobs.rows()
        if not details:
            yield from self._events(indices)
            return
        for place, event in zip(indices, self._events(indices), strict=True):
            found: Any = event
            yield replace(found, **{name: values[place] for name, values in details.items()})

    def _events(self, indices: Sequence[int]) -> Iterator[EventT_co]:
        heads = list(zip(self.sessions.tolist(), self.generations.tolist(), self.base_lengths.tolist(), strict=True))
        if self.is_sparse:
            yield from self._sparse_events(heads, indices)
            return
        rows = list(_rows(self.counts, self.token_ids))
        for place, states in zip(indices, self.states_at(indices), strict=True):
            event: Any = self.make(*heads[place], rows[place])
            yield event if states is None else replace(event, hidden_states=states)

    def states_at(self, indices: Sequence[int]) -> list[HiddenStates | None]:
        """The hidden states of the answers at these indices; None where there are none."""
        if self.states is None:
            return [None] * len(indices)
        found = list(self.states.hidden_states())
        return [found[place] for place in indices]

    def _sparse_events(self, heads: Sequence[tuple[int, int, int]], indices: Sequence[int]) -> Iterator[Any]:
        edges = _edges(self.counts)
        masses, supports = self.outside_masses, self.supports
        of_supports = [] if supports is None else _edges(supports.counts)
        for place, states in zip(indices, self.states_at(indices), strict=True):
            own = slice(edges[place], edges[place + 1])
            if masses is not None:
                probs = _NO_PROBS if supports is None else supports.probs[of_supports[place] : of_supports[place + 1]]
                form = SparseScores(probs, masses[own], self.token_ids[own])
                yield Scores(*heads[place], form, hidden_states=states)
            elif supports is not None:
                ids = slice(of_supports[own.start], of_supports[own.stop])
                evidence = SparseEvidence(supports.counts[own], supports.token_ids[ids], supports.probs[ids])
                yield Proposal(*heads[place], tuple(self.token_ids[own].tolist()), evidence)

    def timings(self, indices: Sequence[int]) -> list[ItemTiming | None]:
        """The items' times at these indices; None where the service did not say."""
        if not self.timings_ns:
            return [None] * len(indices)
        numbers, width = self.timings_ns, NUMBERS_IN_A_TIMING
        if len(numbers) == width:
            return [ItemTiming(*numbers)] * len(indices)
        rows = [numbers[width * place : width * (place + 1)] for place in indices]
        return [ItemTiming(*row) for row in rows]


@step_value(frozen=True, slots=True)
class ExtendBatch:
    """``Extend`` of sessions that differ."""

    sessions: Column  # [B]
    generations: Column  # [B]
    num_kept_tokens: Column  # [B]
    chains: bytes
    """Chains of the prefix hashes, of those sessions that keep a block or more."""
    hash_tails: Column  # [B] uint64, running hashes of the prefix hashes
    counts: Column  # [B] committed tokens of each
    token_ids: Column  # [T]
    draft_lengths: Column  # [B] tokens asked for
    states: StateBatch | None = None
    """Hidden states for a draft that reads them."""
    channel: int = 0
    """The proposal channel by which the proposals go to the target too, if they leave as arrays; 0: by none."""
    trace_parents: Sequence[str] = ()  # [B], or none; empty for one that is not traced
    hidden_states: Sequence[HiddenStates] = ()  # [B], or none
    """Hidden states that ``states`` cannot hold."""

    def __len__(self) -> int:
        return len(self.sessions)

    def items(self) -> Iterator[Extend]:
        """The commands, one by one."""
        states: Iterable[HiddenStates | None] = self.hidden_states or [None] * len(self)
        if self.states is not None:
            states = self.states.hidden_states()
        rows = zip(_heads(self), token_rows(self), self.draft_lengths.tolist(), _parents(self), states, strict=True)
        for head, token_ids, length, parent, own in rows:
            yield Extend(*head, token_ids, length, parent, own, self.channel)


@step_value(frozen=True, slots=True)
class ScoreBatch:
    """``Score`` of sessions that differ."""

    sessions: Column  # [B]
    generations: Column  # [B]
    num_kept_tokens: Column  # [B]
    chains: bytes
    hash_tails: Column  # [B] uint64
    counts: Column  # [B]
    token_ids: Column  # [T]
    draft_lengths: Column  # [B] draft tokens of each
    draft_token_ids: Column  # [sum(draft_lengths)]
    hidden_states_from: Column | None = None  # [B]
    """None: hidden states are wanted of none."""
    plane: int = 0
    """Plane that carries the scores."""
    support_counts: Column | None = None  # [sum(draft_lengths)] int32, ids in the support of each draft token
    support_token_ids: Column | None = None  # [N] int32
    """None: no command has a support. One whose supports have no ids has none either."""
    channel: int = 0
    """The proposal channel by which the draft tokens came; 0: by none. Never travels."""
    trace_parents: Sequence[str] = ()  # [B], or none; empty for one that is not traced
    begins_next: bool = False
    """The target may begin the steps after this one by itself. Never travels."""

    @property
    def is_direct(self) -> bool:
        """True if the draft tokens came by a proposal channel."""
        return self.channel != 0

    def __len__(self) -> int:
        return len(self.sessions)

    def without_drafts(self, indices: NDArray[np.intp]) -> ScoreBatch:
        """The commands at these indices, without their draft tokens and supports."""
        return ScoreBatch(
            self.sessions[indices],
            self.generations[indices],
            self.num_kept_tokens[indices],
            _chains_at(self, indices),
            self.hash_tails[indices],
            self.counts[indices],
            self.token_ids[ragged(self.counts, indices)],
            self.draft_lengths[indices],
            self.draft_token_ids[:0],
            None if self.hidden_states_from is None else self.hidden_states_from[indices],
            self.plane,
            trace_parents=[self.trace_parents[place] for place in indices.tolist()] if self.trace_parents else (),
        )

    def items(self) -> Iterator[Score]:
        """The commands, one by one."""
        drafts, supports = _rows(self.draft_lengths, self.draft_token_ids), self.supports()
        firsts = [None] * len(self) if self.hidden_states_from is None else self.hidden_states_from.tolist()
        rows = zip(token_rows(self), drafts, supports, _parents(self), firsts, strict=True)
        for head, (token_ids, draft, support, parent, first) in zip(_heads(self), rows, strict=True):
            yield Score(*head, token_ids, draft, support, parent, first, self.plane, self.is_direct)

    def supports(self) -> list[Support | None]:
        """The support of each command."""
        counts, ids = self.support_counts, self.support_token_ids
        if counts is None or ids is None:
            return [None] * len(self)
        edges, of_ids = _edges(self.draft_lengths), _edges(counts)
        found: list[Support | None] = []
        for start, stop in itertools.pairwise(edges):
            first, last = of_ids[start], of_ids[stop]
            found.append(Support(counts[start:stop], ids[first:last]) if last > first else None)
        return found


CommandBatch = ExtendBatch | ScoreBatch


def has_whole_evidence(proposal: Proposal) -> bool:
    """True for a proposal with tokens and sparse evidence with a row for each."""
    evidence = proposal.evidence
    return (
        isinstance(evidence, SparseEvidence)
        and 0 < evidence.counts.size == len(proposal.token_ids)
        and evidence.token_ids.size == evidence.probs.size == evidence.counts.sum()
        and int(evidence.counts.min()) >= 0
    )


@step_value(frozen=True, slots=True)
class ScoreAhead:
    """``Score`` of sessions whose draft tokens come by a proposal channel, sent while the draft computes."""

    batched: ScoreBatch
    """Score items without draft tokens and supports; ``draft_lengths`` are what the draft was asked for."""
    channel: int
    proposals: Column  # [B] uint64, generations of the ``Extend`` that the proposals answer

    @property
    def channel_key(self) -> bytes:
        """Names the proposals that it waits for, as ``AnswerBatch.channel_key`` does."""
        return _channel_key(self.batched.sessions, self.proposals)

    def rows_for(self, key: bytes, counts: Column) -> Sequence[int] | None:
        """Rows that wait for the proposals of one message, in its order; None unless each proposal is waited for here,
        and has as many tokens as were asked for. ``key``: its ``AnswerBatch.channel_key``, ``counts`` [B] its tokens.
        """
        lengths = self.batched.draft_lengths
        if key == self.channel_key:
            return range(lengths.size) if np.array_equal(lengths, counts) else None
        known = zip(_keys_of(self.channel_key), enumerate(lengths.tolist()), strict=True)
        rows = dict(known)
        found = [rows.get(each, (-1, 0)) for each in _keys_of(key)]
        is_whole = [length for _, length in found] == counts.tolist() and len(set(found)) == len(found)
        return [row for row, _ in found] if is_whole and (-1, 0) not in found else None

    def selected(self, rows: Sequence[int]) -> ScoreAhead:
        """Announcement of these rows alone."""
        indices = np.array(rows, dtype=np.intp)
        return ScoreAhead(self.batched.without_drafts(indices), self.channel, self.proposals[indices])

    def without(self, rows: Sequence[int]) -> ScoreAhead | None:
        """Rest that still waits after the proposals of these rows have arrived; None if nothing does."""
        if len(rows) == len(self.batched):
            return None
        return self.selected(sorted(set(range(len(self.batched))).difference(rows)))

    def with_proposals(self, draft_token_ids: Column, supports: tuple[Column, Column] | None) -> ScoreBatch:
        """Scores to compute, now that the proposals are there. ``supports``: counts and ids."""
        counts, ids = (None, None) if supports is None else supports
        return replace(
            self.batched,
            draft_token_ids=draft_token_ids,
            support_counts=counts,
            support_token_ids=ids,
            channel=self.channel,
        )


def token_scores(session: int, generation: int, base_length: int, token_ids: tuple[int, ...]) -> Scores:
    """Scores of the form that greedy and coupled sessions get."""
    return Scores(session, generation, base_length, TokenScores(token_ids))


def is_batch(batched: CommandBatch) -> bool:
    """True if a service may take commands together: no prompts."""
    if isinstance(batched, ExtendBatch) and batched.hidden_states:
        return False
    return max(batched.counts.tolist(), default=0) <= MAX_ROW_TOKENS


def num_items(commands: Sequence[Any]) -> int:
    """Commands, those of arrays counted one by one."""
    return sum([len(command) if isinstance(command, CommandBatch) else 1 for command in commands])


def one_by_one(commands: Sequence[Any], *, stays: Callable[[CommandBatch], bool] = lambda batched: False) -> list[Any]:
    """Commands, those of arrays taken out of them, in their order; arrays that ``stays`` says stay whole."""
    found: list[Any] = []
    for command in commands:
        if isinstance(command, CommandBatch) and not stays(command):
            found += command.items()
        else:
            found.append(command)
    return found


def chain_rows(chains: Sequence[bytes]) -> NDArray[np.uint8]:  # [B, CHAIN_BYTES]
    """Chains of prefix hashes as rows; zeros for texts without a full block, whose chain is empty."""
    joined = b"".join([chain or bytes(CHAIN_BYTES) for chain in chains])
    return np.frombuffer(joined, dtype=np.uint8).reshape(-1, CHAIN_BYTES)


def ragged(counts: Column, indices: NDArray[np.intp]) -> NDArray[np.intp]:  # counts [B] -> [sum(counts[indices])]
    """Indices of the values of these rows among rows of ``counts`` values, one after the other."""
    counts = counts.astype(np.intp, copy=False)
    own = counts[indices]
    shifts = (counts.cumsum() - counts)[indices] - (own.cumsum() - own)
    found: NDArray[np.intp] = shifts.repeat(own) + np.arange(int(own.sum()))
    return found


def _channel_key(sessions: Column, generations: Column) -> bytes:
    return sessions.astype(U8, copy=False).tobytes() + generations.astype(U8, copy=False).tobytes()


def _keys_of(channel_key: bytes) -> list[tuple[int, int]]:
    """Session and generation of each proposal that a ``channel_key`` names."""
    sessions, generations = np.frombuffer(channel_key, dtype=U8).reshape(2, -1).tolist()
    return list(zip(sessions, generations, strict=True))


def _chains_at(batched: CommandBatch, indices: NDArray[np.intp]) -> bytes:
    has_chain = batched.num_kept_tokens >= BLOCK_TOKENS
    rows = np.frombuffer(batched.chains, dtype=np.uint8).reshape(-1, CHAIN_BYTES)
    own: NDArray[np.uint8] = rows[(has_chain.cumsum() - 1)[indices[has_chain[indices]]]]
    return own.tobytes()


def _edges(counts: Column) -> list[int]:
    """Offsets of rows with these numbers of values, and the end of the last."""
    return [0, *counts.cumsum(dtype=np.int64).tolist()]


def _heads(batched: CommandBatch) -> Iterator[tuple[int, int, int, PrefixHash]]:
    start = 0
    lists = batched.sessions.tolist(), batched.generations.tolist(), batched.num_kept_tokens.tolist()
    for session, generation, kept, rest in zip(*lists, batched.hash_tails.tolist(), strict=True):
        end = start + chain_size(kept)
        yield session, generation, kept, (batched.chains[start:end], rest)
        start = end


def token_rows(batched: CommandBatch) -> Iterator[tuple[int, ...]]:
    """The committed tokens of each command; packed if they are many."""
    counts = batched.counts.tolist()
    if max(counts, default=0) < MIN_PACKED_IDS:
        yield from _rows(batched.counts, batched.token_ids)
        return
    for start, stop in itertools.pairwise(_edges(batched.counts)):
        yield unpack_long(batched.token_ids[start:stop].astype(I4, copy=False).tobytes())


def _parents(batched: CommandBatch) -> Sequence[str]:
    return batched.trace_parents or [""] * len(batched)


def _rows(counts: Column, values: Column) -> Iterator[tuple[int, ...]]:
    flat, start = values.tolist(), 0
    for count in counts.tolist():
        yield tuple(flat[start : start + count])
        start += count
