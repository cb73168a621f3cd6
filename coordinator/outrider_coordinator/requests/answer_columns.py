"""Answer columns: the answers of a message as columns, those among them that came as single events too.

Services of the same process answer some steps with single events; over a link all answers are columns.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from outrider.columns import AnswerColumns
from outrider.errors import ProtocolError
from outrider.item_columns import columns_of_answers
from outrider.ports import EventBatch, ItemTiming, Proposal, Scores

_Timed: TypeAlias = "list[tuple[Any, ItemTiming | None]]"


def in_columns(batch: EventBatch[Any]) -> tuple[_Timed, tuple[AnswerColumns[Any], ...]]:
    """Single events of a message that are no answers, with their times, and all answers as columns.

    Single answers stay events where the parts of one do not fit each other: each session says what is wrong.
    """
    if not batch.events:
        return [], batch.columns
    timed = list(batch.timed())
    answers = [one for one in timed if isinstance(one[0], Proposal | Scores)]
    if not answers:
        return timed, batch.columns
    timings = [timing for _, timing in answers if timing is not None]
    try:
        made = columns_of_answers([event for event, _ in answers], timings if len(timings) == len(answers) else ())
    except (ProtocolError, OverflowError):  # a negative token id does not fit a column
        return timed, batch.columns
    return [one for one in timed if not isinstance(one[0], Proposal | Scores)], (*batch.columns, *made)


def selected(answers: AnswerColumns[Any], places: NDArray[np.int64]) -> AnswerColumns[Any]:
    """The answers at these places."""
    if len(places) == len(answers.sessions) and (places == np.arange(len(places))).all():
        return answers
    return answers.selected(places)
