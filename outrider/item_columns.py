"""Item columns: single commands and answers as columns, which is how they travel.

A group of items with the same form makes one set of columns. Raises ``ProtocolError`` for items whose parts do not fit
each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.columns import (
    F4,
    I4,
    MAX_ROW_TOKENS,
    U4,
    U8,
    AnswerColumns,
    Column,
    CommandColumns,
    ExtendColumns,
    ScoreColumns,
    StateColumns,
    SupportColumns,
    token_scores,
)
from outrider.errors import ProtocolError
from outrider.ports import Extend, ItemTiming, Proposal, Score, Scores
from outrider.prefix_hash import chain_size
from outrider.types import (
    DenseEvidence,
    DenseScores,
    HiddenStates,
    PackedTokenIds,
    SparseEvidence,
    TokenScores,
    TypicalScores,
)

_NO_IDS = np.zeros(0, dtype=I4)
_INLINE = "inline"
"""Form of hidden states that are not by one reference."""


def columns_of_commands(commands: Sequence[Extend | Score]) -> list[CommandColumns]:
    """Commands of different sessions as columns: by kind and form of hidden states, prompts and traced ones apart."""
    if len(commands) == 1:
        return [_command_columns(commands)]
    groups: dict[object, list[Extend | Score]] = {}
    for command in commands:
        groups.setdefault((type(command), _command_form(command)), []).append(command)
    return [_command_columns(group) for group in groups.values()]


def columns_of_answers(
    answers: Sequence[Proposal | Scores], timings: Sequence[ItemTiming] = ()
) -> list[AnswerColumns[Any]]:
    """Answers to different sessions as columns, by form; each with whole rows of probabilities by itself.

    ``timings``: of each, or none.
    """
    if len(answers) == 1:
        return [_answer_columns(answers, timings)]
    groups: dict[object, list[int]] = {}
    for place, answer in enumerate(answers):
        groups.setdefault(_answer_form(answer), []).append(place)
    return [
        _answer_columns([answers[place] for place in places], [timings[place] for place in places] if timings else ())
        for places in groups.values()
    ]


# Commands.


def _command_form(command: Extend | Score) -> object:
    is_prompt, is_traced = len(command.token_ids) > MAX_ROW_TOKENS, bool(command.trace_parent)
    if isinstance(command, Extend):
        return is_prompt, is_traced, _states_form(command.hidden_states)
    return is_prompt, is_traced, None if command.hidden_states_from is None else command.plane


def _states_form(states: HiddenStates | None) -> object:
    return None if states is None else StateColumns.form_of(states) or _INLINE


def _command_columns(commands: Sequence[Any]) -> CommandColumns:
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
            return ExtendColumns(*heads, lengths, None, 0, parents, () if first.hidden_states is None else states)
        return ExtendColumns(*heads, lengths, StateColumns.of(states), 0, parents)
    drafts = [command.draft_token_ids for command in commands]
    firsts = [command.hidden_states_from for command in commands]
    return ScoreColumns(
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
        return answer.session if isinstance(answer.evidence, DenseEvidence) else type(answer.evidence)
    if isinstance(answer.form, DenseScores):
        return answer.session
    wants = bool(answer.logprobs), bool(answer.prompt_logprobs), bool(answer.draft_token_ids)
    return type(answer.form), wants, _states_form(answer.hidden_states)


def _answer_columns(answers: Sequence[Any], timings: Sequence[ItemTiming]) -> AnswerColumns[Any]:
    first = answers[0]
    is_proposal = isinstance(first, Proposal)
    form = first.evidence if is_proposal else first.form
    rows, masses, supports, details = (_proposed if is_proposal else _scored)(form, answers)
    states = None
    if not is_proposal:
        details |= _score_details(answers)
        if _states_form(first.hidden_states) not in (None, _INLINE):
            states = StateColumns.of([answer.hidden_states for answer in answers])
    return AnswerColumns(
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
        details or None,
    )


def _timing_numbers(timings: Sequence[ItemTiming]) -> Sequence[int]:
    if timings and all(timing is timings[0] for timing in timings):  # of one message and one forward
        return timings[0].numbers
    return [number for timing in timings for number in timing.numbers]


def _proposed(evidence: object, proposals: Sequence[Any]) -> tuple[Any, None, SupportColumns | None, dict[str, Any]]:
    rows = [proposal.token_ids for proposal in proposals]
    if isinstance(evidence, DenseEvidence):
        return rows, None, None, {"evidence": [proposal.evidence for proposal in proposals]}
    if not isinstance(evidence, SparseEvidence):
        return rows, None, None, {}
    found = [proposal.evidence for proposal in proposals]
    for row, each in zip(rows, found, strict=True):
        _check_rows("evidence", len(row), each.counts, each.token_ids.size, each.probs.size)
    supports = SupportColumns(
        np.concatenate([each.counts for each in found]),
        np.concatenate([each.token_ids for each in found]),
        np.concatenate([each.probs for each in found]),
    )
    return rows, None, supports, {}


def _scored(form: object, scores: Sequence[Any]) -> tuple[Any, Column | None, SupportColumns | None, dict[str, Any]]:
    forms = [each.form for each in scores]
    if isinstance(form, TokenScores):
        return [each.token_ids for each in forms], None, None, {}
    if isinstance(form, TypicalScores):
        return [(*each.argmax_token_ids.tolist(), each.bonus_token_id) for each in forms], None, None, {"form": forms}
    if isinstance(form, DenseScores):
        return [(0,) * len(each.target_probs) for each in forms], None, None, {"form": forms}
    if any(each.outside_token_ids.size != each.outside_mass.size for each in forms):
        raise ProtocolError("scores: outside_token_ids and outside_mass must have a value for each position")
    sizes = np.array([each.support_probs.size for each in forms], dtype=U4)
    supports = None
    if sizes.any():
        supports = SupportColumns(sizes, _NO_IDS, np.concatenate([each.support_probs for each in forms]).astype(F4))
    masses = np.concatenate([each.outside_mass for each in forms])
    return [each.outside_token_ids for each in forms], masses, supports, {}


def _score_details(scores: Sequence[Scores]) -> dict[str, Any]:
    first, found = scores[0], dict[str, Any]()
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(first, name):
            found[name] = [getattr(each, name) for each in scores]
    if _states_form(first.hidden_states) == _INLINE:
        found["hidden_states"] = [each.hidden_states for each in scores]
    return found


def _drafts(scores: Iterable[Scores]) -> Column:
    return np.array([token_id for each in scores for token_id in each.draft_token_ids], dtype=U4)
