"""Answer columns: answers that came one by one as columns, so that they take the transitions of many sessions.

Only what those transitions judge: proposals with tokens, and scores that are tokens or of sparse rejection, with hidden
states by reference or none. Any other answer stays as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.columns import (
    I4,
    AnswerColumns,
    StateColumns,
    has_whole_evidence,
)
from outrider.item_columns import answer_columns, proposal_columns
from outrider.ports import ItemTiming, Proposal, Scores
from outrider.types import SparseScores, TokenScores

_NUM_IDS = 1 << 32


def columns_of(
    answers: Sequence[tuple[Any, ItemTiming | None]], sessions: set[int]
) -> Iterator[tuple[list[int], AnswerColumns[Any]]]:
    """Columns of the answers to these sessions with their times, and the places of these among ``answers``.

    A session that is named more than once is in none.
    """
    num_named = Counter([event.session for event, _ in answers])
    groups: dict[Hashable, list[int]] = {}
    for place, (event, _) in enumerate(answers):
        if event.session in sessions and num_named[event.session] == 1 and (form := _form_of(event)) is not None:
            groups.setdefault(form, []).append(place)
    for places in groups.values():
        timings = [timing for place in places if (timing := answers[place][1]) is not None]
        events = [answers[place][0] for place in places]
        columns = _joined(events, timings if len(timings) == len(events) else [])
        if columns is not None:
            yield places, columns


def selected(answers: AnswerColumns[Any], places: NDArray[np.int64]) -> AnswerColumns[Any]:
    """The answers at these places."""
    if len(places) == len(answers.sessions) and (places == np.arange(len(places))).all():
        return answers
    return answers.selected(places)


def _form_of(event: Any) -> Hashable | None:  # noqa: ANN401 - any event
    """What answers in the same columns have in common; None for one that is in none."""
    if isinstance(event, Proposal):
        is_judged = event.evidence is None or _is_typed_evidence(event)
        return (Proposal, event.evidence is None) if is_judged and _are_ids(event.token_ids) else None
    if not isinstance(event, Scores) or event.prompt_logprobs or event.draft_token_ids:
        return None
    states = None if event.hidden_states is None else StateColumns.form_of(event.hidden_states)
    if event.hidden_states is not None and states is None:
        return None
    form = event.form
    if isinstance(form, TokenScores):
        return (TokenScores, states) if _are_ids(form.token_ids) else None
    return (SparseScores, states) if isinstance(form, SparseScores) and _is_typed(form) else None


def _are_ids(token_ids: Sequence[int]) -> bool:
    return bool(token_ids) and min(token_ids) >= 0 and max(token_ids) < _NUM_IDS


def _is_typed_evidence(proposal: Proposal) -> bool:
    evidence: Any = proposal.evidence
    return has_whole_evidence(proposal) and evidence.token_ids.dtype == I4 and evidence.probs.dtype == np.float32


def _is_typed(form: SparseScores) -> bool:
    probs, masses, ids = form.support_probs, form.outside_mass, form.outside_token_ids
    has_shapes = probs.ndim == masses.ndim == ids.ndim == 1 and 0 < masses.size == ids.size
    return has_shapes and probs.dtype == masses.dtype == np.float32 and ids.dtype == I4


def _joined(events: Sequence[Any], timings: Sequence[ItemTiming]) -> AnswerColumns[Any] | None:
    if isinstance(events[0], Proposal):
        return proposal_columns(events, timings, 0)
    return answer_columns(events, timings)
