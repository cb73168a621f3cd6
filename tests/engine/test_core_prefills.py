"""How large a prompt's chunk is while running sessions are away for a moment, by a clock that the test moves."""

from __future__ import annotations

from collections.abc import Sequence

from draft_service.texts import PlainText, PlainTexts
from outrider.engine.core import Pass, ServiceCore
from outrider.engine.ledger import Ledger, Limits, Session
from outrider.ports import Extend, Open, Proposal
from outrider.types import AcceptanceMethod, SamplingParams

ALONE, BESIDE, LENGTH = 500, 100, 2000
MILLISECOND = 1_000_000


class _Job:
    num_last = 1

    def __init__(self, item: Extend) -> None:
        self.item, self.num_left = item, len(item.token_ids)


class _Stage:
    """Notes how many tokens each forward has."""

    num_pages_free = 0

    def __init__(self) -> None:
        self.shares: list[list[int]] = []

    def check(self, session: Session[PlainText], item: Extend) -> Proposal | None:
        return None

    def begin(self, session: Session[PlainText], item: Extend) -> _Job:
        return _Job(item)

    def advance(self, shares: Sequence[tuple[_Job, int]]) -> Pass[Proposal]:
        self.shares.append([share for _, share in shares])
        for job, share in shares:
            job.num_left -= share
        answers = [
            None if job.num_left else Proposal(job.item.session, job.item.generation, 0, ()) for job, _ in shares
        ]
        return Pass(answers, 0)


def test_a_chunk_is_small_while_running_sessions_will_soon_be_back_and_large_again_when_they_are_not() -> None:
    now = [0]
    stage = _Stage()
    ledger = Ledger(PlainTexts(), Limits(vocab_size=10, max_model_len=LENGTH + 1, trims=True))
    core = ServiceCore(
        ledger, stage, max_batched_tokens=ALONE, max_prefill_beside=BESIDE, clock=lambda: now[0] * MILLISECOND
    )
    for session, length in ((1, 1), (2, LENGTH)):
        opening = Open(session, 1, SamplingParams(), 0, AcceptanceMethod.REJECTION, length, LENGTH + 1, 10)
        core.handle(1, [opening, Extend(session, 2, 0, 0, (3,) * length, 1)])
    core.step()
    now[0] = 10
    core.step()
    now[0] = 200
    core.step()
    assert stage.shares == [[1, BESIDE], [BESIDE], [ALONE]]
