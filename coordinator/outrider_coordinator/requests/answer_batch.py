"""Answer arrays: a message with all answers as arrays, those among them that came as single events too.

Services of the same process answer some steps with single events; over a link all answers are arrays.
"""

from __future__ import annotations

from typing import Any

from outrider.errors import ProtocolError
from outrider.item_batch import batch_of_answers
from outrider.ports import EventBatch, Proposal, Scores


def in_batch(batch: EventBatch[Any]) -> EventBatch[Any]:
    """The message with its single answers as arrays, after those that it has.

    They stay events where the parts of one do not fit each other: each session says what is wrong.
    """
    answers = [one for one in batch.timed() if isinstance(one[0], Proposal | Scores)]
    if not answers:
        return batch
    timings = [timing for _, timing in answers if timing is not None]
    try:
        made = batch_of_answers([event for event, _ in answers], timings if len(timings) == len(answers) else ())
    except (ProtocolError, OverflowError):  # a negative token id does not fit a column
        return batch
    others = [one for one in batch.timed() if not isinstance(one[0], Proposal | Scores)]
    return EventBatch.of(others, batch.report, (*batch.batched, *made))
