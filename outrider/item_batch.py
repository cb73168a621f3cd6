"""Item arrays: single commands and answers as arrays, which is how they travel and how many are taken at once.

A group of items with the same form makes one set of arrays. ``batch_of_...`` form such groups, and raise
``ProtocolError`` for items whose parts do not fit each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.batched import (
    F4,
    I4,
    MAX_ROW_TOKENS,
    U4,
    U8,
    AnswerBatch,
    Column,
    CommandBatch,
    ExtendBatch,
    LogprobBatch,
    ScoreBatch,
    StateBatch,
    SupportBatch,
    has_whole_evidence,
    token_scores,
)
from outrider.errors import ProtocolError
from outrider.ports import Extend, ItemTiming, Proposal, Score, Scores
from outrider.prefix_hash import chain_size
from outrider.types import (
    HiddenStates,
    PackedTokenIds,
    SparseEvidence,
    SparseScores,
    TokenScores,
    TypicalScores,
)

_NO_IDS = np.zeros(0, dtype=I4)
_INLINE = "inline"
"""Form of hidden states that are not by one reference."""


def batch_of_commands(commands: Sequence[Extend | Score]) -> list[CommandBatch]:
    """Commands of different sessions as arrays: by kind and form of hidden states, prompts apart."""
    if len(commands) == 1:
        return [command_batch(commands)]
    groups: dict[object, list[Extend | Score]] = {}
    for command in commands:
        groups.setdefault((type(command), _command_form(command)), []).append(command)
    return [command_batch(group) for group in groups.values()]


def batch_of_answers(
    answers: Sequence[Proposal | Scores], timings: Sequence[ItemTiming] = ()
) -> list[AnswerBatch[Any]]:
    """Answers to different sessions as arrays, by form; each with whole rows of probabilities by itself.

    ``timings``: of each, or none.
    """
    if len(answers) == 1:
        return [_checked_batch(answers, timings)]
    groups: dict[object, list[int]] = {}
    for place, answer in enumerate(answers):
        groups.setdefault(_answer_form(answer), []).append(place)
    return [
        _checked_batch([answers[place] for place in indices], [timings[place] for place in indices] if timings else ())
        for indices in groups.values()
    ]


# Commands.


def _command_form(command: Extend | Score) -> object:
    is_prompt = len(command.token_ids) > MAX_ROW_TOKENS
    if isinstance(command, Extend):
        return is_prompt, _states_form(command.hidden_states)
    return is_prompt, None if command.hidden_states_from is None else command.plane


def _states_form(states: HiddenStates | None) -> object:
    return None if states is None else StateBatch.form_of(states) or _INLINE


def command_batch(commands: Sequence[Any]) -> CommandBatch:
    """Commands of one kind as arrays: all bring or want hidden states by the same reference, or none does."""
    first = commands[0]
    token_ids = [command.token_ids for command in commands]
    heads = (
        np.array([command.session for command in commands], dtype=U8),
        np.array([command.generation for command in commands], dtype=U8),
        np.array([command.num_kept_tokens for command in commands], dtype=U4),
        _chains(commands),
        np.array([command.prefix_hash[1] for command in commands], dtype=U8),
        np.array([len(row) for row in token_ids], dtype=U4),
        _token_column(token_ids),
    )
    is_traced = any(command.trace_parent for command in commands)
    parents = [command.trace_parent for command in commands] if is_traced else ()
    if isinstance(first, Extend):
        lengths = np.array([command.draft_length for command in commands], dtype=U4)
        states = [command.hidden_states for command in commands]
        if _states_form(first.hidden_states) in (None, _INLINE):
            return ExtendBatch(*heads, lengths, None, 0, parents, () if first.hidden_states is None else states)
        return ExtendBatch(*heads, lengths, StateBatch.of(states), 0, parents)
    drafts = [command.draft_token_ids for command in commands]
    firsts = [command.hidden_states_from for command in commands]
    return ScoreBatch(
        *heads,
        np.array([len(row) for row in drafts], dtype=U4),
        np.array([token_id for row in drafts for token_id in row], dtype=U4),
        None if firsts[0] is None else np.array(firsts, dtype=U4),
        first.plane,
        *_supports(commands),
        trace_parents=parents,
    )


def _chains(commands: Sequence[Any]) -> bytes:
    for command in commands:
        if len(command.prefix_hash[0]) != chain_size(command.num_kept_tokens):
            raise ProtocolError(
                f"prefix_hash: its chain has {len(command.prefix_hash[0])} bytes;"
                f" {command.num_kept_tokens} kept tokens have {chain_size(command.num_kept_tokens)}"
            )
    return b"".join([command.prefix_hash[0] for command in commands])


def _token_column(rows: Sequence[tuple[int, ...]]) -> Column:
    if not any(isinstance(row, PackedTokenIds) for row in rows):
        return np.array([token_id for row in rows for token_id in row], dtype=I4)
    return np.concatenate(
        [
            np.frombuffer(row.packed, dtype=I4) if isinstance(row, PackedTokenIds) else np.array(row, dtype=I4)
            for row in rows
        ]
    )


def _supports(scores: Sequence[Score]) -> tuple[Column | None, Column | None]:
    """Counts and ids of the supports; None where no ``Score`` has one."""
    if all(score.support is None for score in scores):
        return None, None
    counts: list[Column] = []
    ids: list[Column] = []
    for score in scores:
        support, num_drafts = score.support, len(score.draft_token_ids)
        if support is None:
            counts.append(np.zeros(num_drafts, dtype=I4))
            continue
        _check_rows("support", num_drafts, support.counts, support.token_ids.size)
        counts.append(support.counts)
        ids.append(support.token_ids)
    return np.concatenate(counts), np.concatenate(ids)


def _check_rows(name: str, num_rows: int, counts: NDArray[Any], *sizes: int) -> None:
    if counts.size != num_rows or any(size != counts.sum() for size in sizes) or (counts < 0).any():
        raise ProtocolError(f"{name}: {counts.size} rows of {sizes} ids do not fit {num_rows} draft tokens")


# Answers.


def _answer_form(answer: Proposal | Scores) -> object:
    if isinstance(answer, Proposal):
        return type(answer.evidence)
    wants = bool(answer.prompt_logprobs), bool(answer.draft_token_ids)
    return type(answer.form), wants, _states_form(answer.hidden_states)


def _checked_batch(answers: Sequence[Any], timings: Sequence[ItemTiming]) -> AnswerBatch[Any]:
    """Answers of one form as arrays, with what arrays do not hold."""
    is_proposal = isinstance(answers[0], Proposal)
    (_check_evidence if is_proposal else _check_forms)(answers)
    details = {} if is_proposal else _score_details(answers)
    batched = answer_batch(answers, timings)
    return replace(batched, details=details) if details else batched


def answer_batch(answers: Sequence[Any], timings: Sequence[ItemTiming]) -> AnswerBatch[Any]:
    """Answers of one form, whose parts fit each other, as arrays without ``details``."""
    first = answers[0]
    is_proposal = isinstance(first, Proposal)
    rows, masses, supports = (_proposed if is_proposal else _scored)(answers)
    states = None
    if not is_proposal and _states_form(first.hidden_states) not in (None, _INLINE):
        states = StateBatch.of([answer.hidden_states for answer in answers])
    return AnswerBatch(
        np.array([answer.session for answer in answers], dtype=U8),
        np.array([answer.generation for answer in answers], dtype=U8),
        np.array([answer.base_length for answer in answers], dtype=U4),
        np.array([len(row) for row in rows], dtype=U4),
        np.array([token_id for row in rows for token_id in row], dtype=U4) if masses is None else np.concatenate(rows),
        _timing_numbers(timings),
        Proposal if is_proposal else token_scores,
        masses,
        states,
        supports,
        0,
        _drafts(answers) if not is_proposal and first.draft_token_ids else None,
        logprobs=None if is_proposal else LogprobBatch.of([answer.logprobs for answer in answers]),
    )


def proposal_batch(
    proposals: Sequence[Proposal], timings: Sequence[ItemTiming], channel: int
) -> AnswerBatch[Proposal] | None:
    """Proposals of one step as arrays; None unless each has tokens, and whole sparse evidence or none like the others.
    ``timings``: of each, or none.
    """
    is_alike = all(map(has_whole_evidence, proposals)) or all(proposal.evidence is None for proposal in proposals)
    if not is_alike or not all(proposal.token_ids for proposal in proposals):
        return None
    batched = answer_batch(proposals, timings)
    return replace(batched, channel=channel) if channel else batched


def _timing_numbers(timings: Sequence[ItemTiming]) -> Sequence[int]:
    if timings and all(timing is timings[0] for timing in timings):  # of one message and one forward
        return timings[0].numbers
    return [number for timing in timings for number in timing.numbers]


def _proposed(proposals: Sequence[Any]) -> tuple[Any, None, SupportBatch | None]:
    rows, evidence = [proposal.token_ids for proposal in proposals], [proposal.evidence for proposal in proposals]
    if not isinstance(evidence[0], SparseEvidence):
        return rows, None, None
    supports = SupportBatch(
        np.concatenate([each.counts for each in evidence]),
        np.concatenate([each.token_ids for each in evidence]),
        np.concatenate([each.probs for each in evidence]),
    )
    return rows, None, supports


def _scored(scores: Sequence[Any]) -> tuple[Any, Column | None, SupportBatch | None]:
    forms = [each.form for each in scores]
    if isinstance(forms[0], TokenScores):
        return [each.token_ids for each in forms], None, None
    if isinstance(forms[0], TypicalScores):
        return [(*each.argmax_token_ids.tolist(), each.bonus_token_id) for each in forms], None, None
    sizes = np.array([each.support_probs.size for each in forms], dtype=U4)
    supports = None
    if sizes.any():
        probs = np.concatenate([each.support_probs for each in forms])
        supports = SupportBatch(sizes, _NO_IDS, probs.astype(F4, copy=False))
    return [each.outside_token_ids for each in forms], np.concatenate([each.outside_mass for each in forms]), supports


def _check_evidence(proposals: Sequence[Proposal]) -> None:
    for proposal in proposals:
        if isinstance(each := proposal.evidence, SparseEvidence):
            _check_rows("evidence", len(proposal.token_ids), each.counts, each.token_ids.size, each.probs.size)


def _check_forms(scores: Sequence[Scores]) -> None:
    forms = [each.form for each in scores]
    if any(isinstance(each, SparseScores) and each.outside_token_ids.size != each.outside_mass.size for each in forms):
        raise ProtocolError("scores: outside_token_ids and outside_mass must have a value for each position")


def _score_details(scores: Sequence[Scores]) -> dict[str, Any]:
    first, found = scores[0], dict[str, Any]()
    if isinstance(first.form, TypicalScores):
        found["form"] = [each.form for each in scores]
    if first.prompt_logprobs:
        found["prompt_logprobs"] = [each.prompt_logprobs for each in scores]
    if _states_form(first.hidden_states) == _INLINE:
        found["hidden_states"] = [each.hidden_states for each in scores]
    return found


def _drafts(scores: Iterable[Scores]) -> Column:
    return np.array([token_id for each in scores for token_id in each.draft_token_ids], dtype=U4)
