"""Begun steps: proposals that are computed before the coordinator asks for them.

A target's verdict says which text the next ``Extend`` will continue. The proposal is computed at once, as a request
that was not asked for, or here as one step of arrays. An ``Extend`` that asks for just that adopts the step while it
runs, or claims its answer later; others are served as if nothing had been begun, so a wrong, late or repeated verdict
costs time and never a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.batched import U4, U8, AnswerBatch, Column, ExtendBatch, StateBatch, SupportBatch
from outrider.ports import Extend, Proposal
from outrider.proposal_channel.verdicts import StateVerdicts, Verdicts
from outrider.recording import ForwardRecord
from outrider.serving.decode.step import DecodeBatch
from outrider.serving.executor import Executor, ExecutorOutput, InFlightForward
from outrider.serving.session import Session, SessionKey
from outrider.serving.session_registry import SessionRegistry
from outrider.serving.stats import ServiceStats

_OF_TEXTS = ("sessions", "num_kept_tokens", "hash_tails", "counts", "token_ids")


@dataclass(frozen=True, slots=True, eq=False)
class BegunStep:
    """A step that is computed, and what it was computed for."""

    step: DecodeBatch
    items: Sequence[Extend]  # [B]
    answers: AnswerBatch[Any]
    forward: ForwardRecord

    def answers_to(self, batched: ExtendBatch, rows: NDArray[np.intp], indices: NDArray[np.intp]) -> AnswerBatch[Any]:
        """Answers to the commands in ``rows`` of ``batched``, from those at ``indices`` here: as many draft tokens as
        they ask for, or all that were begun.
        """
        answers = replace(self.answers.selected(indices), generations=batched.generations[rows])
        asked = batched.draft_lengths[rows]
        return first_tokens(answers, asked) if (asked < answers.counts).any() else answers


class BegunSteps:
    """The begun steps of one core that may be claimed."""

    def __init__(self, stats: ServiceStats) -> None:
        self._stats = stats
        self._found: dict[SessionKey, tuple[BegunStep, int]] = {}

    def hold(self, step: DecodeBatch, answers: AnswerBatch[Any], forward: ForwardRecord) -> None:
        """Keep the answers of a step, in place of older ones of the same sessions."""
        begun = BegunStep(step, list(step.batched.items()), answers, forward)  # type: ignore[arg-type]
        for place, key in enumerate(step.keys):
            self.drop(key)
            self._found[key] = begun, place

    def claim(self, link_id: int, batched: ExtendBatch) -> list[tuple[BegunStep, list[int], list[int]]]:
        """Begun steps that are what some commands ask for, each with the rows of these and its own indices. No command
        can claim its session's answer again.
        """
        if not self._found:
            return []  # before any item is made
        found: dict[int, tuple[BegunStep, list[int], list[int]]] = {}
        for row, item in enumerate(batched.items()):
            begun, place = self._found.pop((link_id, item.session), (None, 0))
            if begun is None:
                continue
            if continues_text(item, begun.items[place]) and item.draft_length:
                _, rows, indices = found.setdefault(id(begun), (begun, [], []))
                rows.append(row)
                indices.append(place)
            else:
                self._stats.num_lookahead_unused += 1
        claims = list(found.values())
        num_claimed = sum(len(rows) for _, rows, _ in claims)
        if num_claimed < len(batched) and any(begun.step.guessed_from is not None for begun, _, _ in claims):
            self._stats.num_lookahead_unused += num_claimed
            return []  # those that go on at once would be scored apart from the others from then on
        self._stats.num_lookahead_used += num_claimed
        return claims

    def drop(self, key: SessionKey) -> None:
        """A session asks for something else, or ends."""
        if self._found.pop(key, None) is not None:
            self._stats.num_lookahead_unused += 1

    def drop_link(self, link_id: int) -> None:
        """The sessions of a link end."""
        for key in [key for key in self._found if key[0] == link_id]:
            self.drop(key)


def asks_for_same(item: Extend, begun: Extend) -> bool:
    """True if a command asks for what was begun, whatever their generations are."""
    return _has_same_text(item, begun) and item.draft_length == begun.draft_length


def continues_text(item: Extend, begun: Extend) -> bool:
    """True if a newer command continues the text for which something was begun."""
    return _has_same_text(item, begun) and item.generation > begun.generation


def _has_same_text(item: Extend, begun: Extend) -> bool:
    return (
        item.num_kept_tokens == begun.num_kept_tokens
        and item.prefix_hash == begun.prefix_hash
        and item.token_ids == begun.token_ids
        and _positions(item) == _positions(begun)
    )


def _positions(item: Extend) -> tuple[int, int] | None:
    """First position and one past the last of the item's hidden states: those of one text at the same positions are
    the same.
    """
    states = item.hidden_states
    return None if states is None else (states.start, states.end)


def continue_same(batched: ExtendBatch, begun: ExtendBatch) -> bool:
    """True if arrays continue the texts for which all of a step was begun, and no others, whatever their generations
    are and however many draft tokens they ask for.
    """
    return (
        batched.chains == begun.chains
        and all(_is_same(getattr(batched, name), getattr(begun, name)) for name in _OF_TEXTS)
        and bool((batched.generations > begun.generations).all())
        and bool(batched.draft_lengths.all())
        and not batched.hidden_states
        and _have_same_states(batched.states, begun.states)
    )


def _have_same_states(one: StateBatch | None, other: StateBatch | None) -> bool:
    if one is None or other is None:
        return one is other
    return bool(one.starts.tolist() == other.starts.tolist() and one.counts.tolist() == other.counts.tolist())


def _is_same(one: Column, other: Column) -> bool:
    return one.tobytes() == other.astype(one.dtype, copy=False).tobytes()


@dataclass(frozen=True, slots=True)
class ShortenedForward:
    """A begun step whose command asks for fewer draft tokens of some sessions: those past them are left out."""

    forward: InFlightForward[Any]
    longest: Column  # [B]
    truncate: Callable[[Sequence[int]], None]
    """Cuts the sequences to this many tokens each."""

    def is_done(self) -> bool:
        """State of the forward."""
        return self.forward.is_done()

    def finish(self) -> ExecutorOutput[Any]:
        """The proposals as far as they were asked for."""
        output = self.forward.finish()
        if output.batched is None:
            rows = zip(output.results, self.longest.tolist(), strict=True)
            return replace(output, results=[_shortened(result, longest) for result, longest in rows])
        answers = first_tokens(output.batched, self.longest)
        # A draft has no KV for the last of its own tokens.
        held = (answers.base_lengths + answers.counts - U4.type(1)).tolist()

        def postprocess() -> None:
            if output.postprocess is not None:
                output.postprocess()
            self.truncate(held)

        return replace(output, batched=answers, postprocess=postprocess)


def _shortened(result: Any, longest: int) -> Any:  # noqa: ANN401 - an answer or an error
    return replace(result, token_ids=result.token_ids[:longest]) if isinstance(result, Proposal) else result


def first_tokens(proposals: AnswerBatch[Any], longest: Column) -> AnswerBatch[Any]:
    """Proposals, each with this many tokens at most."""
    counts = proposals.counts
    starts = counts.cumsum(dtype=np.int64) - counts
    is_kept = np.arange(proposals.token_ids.size) - starts.repeat(counts) < longest.repeat(counts)
    kept_counts = np.minimum(counts, longest).astype(counts.dtype)
    supports = proposals.supports
    if supports is not None:
        ids = is_kept.repeat(supports.counts)
        supports = SupportBatch(supports.counts[is_kept], supports.token_ids[ids], supports.probs[ids])
    return replace(proposals, counts=kept_counts, token_ids=proposals.token_ids[is_kept], supports=supports)


def extends_after(
    table: SessionRegistry[Any],
    executor: Executor[Any, Any, Any, Any],
    link_id: int,
    verdicts: Verdicts,
    wanted: MutableMapping[SessionKey, int],
) -> ExtendBatch | None:
    """Commands of a coordinator that follow these verdicts, for sessions that go on; None if none does. Each asks for
    as many draft tokens as before, or as are ``wanted``, which are forgotten then. Generations are those of the newest
    items.
    """
    states = verdicts.states if isinstance(verdicts, StateVerdicts) else None
    if (states is not None) != executor.reads_states:
        return None
    numbers = [getattr(verdicts, name).tolist() for name in Verdicts.__slots__]
    scored = list(_scored_drafts(verdicts)) if isinstance(verdicts, StateVerdicts) else [None] * len(verdicts)
    found: list[tuple[int, int, int, int, int, int]] = []
    chains, token_ids, indices = list[bytes](), list[int](), list[int]()
    for place, (number, generation, base, *verdict, drafts) in enumerate(zip(*numbers, scored, strict=True)):
        session = table.get(link_id, number)
        # A verdict is on the answer to the newest item, or it comes too late.
        if session is None or session.generation >= generation or session.num_committed != base:
            continue
        if not executor.follows_verdicts(session):
            continue
        after = _text_after(session, verdict) if drafts is None else _text_after_scored(session, verdict, drafts)
        if after is None:
            continue
        kept, new_tokens, length = after
        chain, rest = table.prefix_hash(session, kept)
        found.append((number, session.generation, kept, rest, len(new_tokens), wanted.pop(session.key, length)))
        chains.append(chain)
        token_ids += new_tokens
        indices.append(place)
    if not found:
        return None
    columns: list[Any] = list(zip(*found, strict=True))
    sessions, generations, tails = [np.array(columns[place], dtype=U8) for place in (0, 1, 3)]
    kepts, counts, lengths = [np.array(columns[place], dtype=U4) for place in (2, 4, 5)]
    own = None if states is None else replace(states.selected(np.array(indices)), counts=counts.astype(np.int64))
    new_ids = np.array(token_ids, dtype=U4)
    return ExtendBatch(sessions, generations, kepts, b"".join(chains), tails, counts, new_ids, lengths, own)


_TextAfter = tuple[int, list[int], int]
"""Kept tokens, those after them, and draft tokens to ask for."""


def _scored_drafts(verdicts: StateVerdicts) -> Iterator[list[int]]:
    """Draft tokens of each session that were scored."""
    token_ids, start = verdicts.draft_token_ids.tolist(), 0
    for count in verdicts.states.counts.tolist():
        stop = start + count - 1
        yield token_ids[start:stop]
        start = stop


def _text_after_scored(session: Session[Any], verdict: Sequence[int], drafts: list[int]) -> _TextAfter | None:
    """``_text_after`` of a draft that reads hidden states and whose text holds no drafts."""
    base, (accepted, _, following) = session.num_committed, verdict
    if not accepted <= len(drafts) or not drafts or session.sequence.length != base:
        return None
    new_tokens = [*drafts[:accepted], following]
    return None if _ends_in(session, new_tokens) else (base, new_tokens, len(drafts))


def _text_after(session: Session[Any], verdict: Sequence[int]) -> _TextAfter | None:
    """None for a session that ends, or was given another number of draft tokens than the verdict is of."""
    base, sequence = session.num_committed, session.sequence
    # A draft has no KV for the last of its own tokens.
    num_drafts = sequence.length - base + 1
    accepted, last, following = verdict
    num_held = min(accepted, num_drafts - 1)
    if not 0 < num_drafts >= accepted:
        return None
    new_tokens = [following] if accepted == num_held else [last, following]
    kept, first = base + num_held, base - sequence.length + len(sequence.token_ids)
    if _ends_in(session, [*sequence.token_ids[first : first + num_held], *new_tokens]):
        return None
    return kept, new_tokens, num_drafts


def _ends_in(session: Session[Any], token_ids: Sequence[int]) -> bool:
    endings = session.open.eos_token_ids
    return bool(endings) and not set(endings).isdisjoint(token_ids)
