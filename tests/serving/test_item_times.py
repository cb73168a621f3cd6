"""Times of an item's stages: each lies between two moments, none is a remainder."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.ports import Extend, ItemTiming, Open, Proposal
from outrider.prefix_hash import EMPTY_PREFIX
from outrider.recording import AnyRecord, ItemRecord
from outrider.serving.engine_core import EngineCore
from outrider.serving.executor import Executor, ExecutorOutput
from outrider.serving.session import Limits, Session
from outrider.serving.session_registry import SessionRegistry
from outrider.serving.stats import ForwardTimes
from outrider.telemetry.tracing import names
from outrider.telemetry.tracing.service_spans import item_spans
from outrider.types import JudgingRule, SamplingParams
from outrider_draft.texts import PlainSequence, PlainSequences

QUEUED, FORWARD, SAMPLE, BETWEEN = 5, 100, 30, 7
NUM_FORWARDS = 3
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
STAGES = (names.QUEUE, names.FORWARD, names.SAMPLE, names.WAIT)


class _Clock:
    """Goes on only when it is told to."""

    now = 1000

    def __call__(self) -> int:
        return self.now


class _Recorder:
    """Keeps what was noted."""

    def __init__(self) -> None:
        self.items: list[ItemRecord] = []

    def ended(self, records: Sequence[AnyRecord]) -> None:
        self.items += [record for record in records if isinstance(record, ItemRecord)]


class _Job:
    num_left = 1
    num_last = 1

    def __init__(self, item: Extend) -> None:
        self.item, self.served = item, 0


class _Executor(Executor[PlainSequence, Extend, _Job, Proposal]):
    """Takes three forwards an item."""

    def __init__(self, clock: _Clock) -> None:
        self._clock = clock

    def begin(self, session: Session[PlainSequence], item: Extend) -> _Job:
        return _Job(item)

    def execute(self, batch: Sequence[tuple[_Job, int]]) -> ExecutorOutput[Proposal]:
        self._clock.now += FORWARD
        computed_ns = self._clock.now
        self._clock.now += SAMPLE
        for job, _ in batch:
            job.served += 1
        results = [
            Proposal(job.item.session, job.item.generation, 0, ()) if job.served == NUM_FORWARDS else None
            for job, _ in batch
        ]
        return ExecutorOutput(results, computed_ns, masked_ns=(computed_ns - FORWARD, computed_ns - 1))


def test_each_stage_lies_between_two_readings_of_the_clock() -> None:
    clock = _Clock()
    session_registry = SessionRegistry(PlainSequences(), Limits(vocab_size=10, max_model_len=10, trims=True))
    core = EngineCore(session_registry, _Executor(clock), clock=clock)
    recorder = core.recorder = _Recorder()
    opening = Open(1, 1, SamplingParams(), 0, JudgingRule.REJECTION, 1, 5, 10)
    core.handle(1, [opening, Extend(1, 2, 0, EMPTY_PREFIX, (3,), 1, trace_parent=PARENT)])
    clock.now += QUEUED
    for _ in range(NUM_FORWARDS - 1):
        assert core.step() == []
        clock.now += BETWEEN
    (_, opened), (_, batch) = core.step()
    core.post_step()
    assert opened.timings == ()
    stages = QUEUED, NUM_FORWARDS * FORWARD, NUM_FORWARDS * SAMPLE, (NUM_FORWARDS - 1) * BETWEEN
    assert batch.timings == (ItemTiming(*stages, sum(stages), NUM_FORWARDS * (FORWARD - 1)),)

    (item,) = recorder.items
    of_item, *below = item_spans(item, names.PROPOSE_ITEM)
    assert of_item.duration_ns == sum(stages)
    drawn = {name: sum(span.duration_ns for span in below if span.name == name) for name in STAGES}
    assert tuple(drawn.values()) == stages
    assert sum(span.name == names.FORWARD for span in below) == NUM_FORWARDS
    masks = [span for span in below if span.name == names.MASK]
    assert [span.duration_ns for span in masks] == [FORWARD - 1] * NUM_FORWARDS


def test_nothing_is_known_at_first() -> None:
    times = ForwardTimes()
    assert times.longest_s(1) == times.longest_s(4096) == 0.0
    assert not times.knows(1)


def test_a_larger_forward_may_take_proportionally_longer() -> None:
    times = ForwardTimes()
    times.note(1, 1.4)
    assert times.longest_s(1) == 1.4
    assert times.longest_s(1000) == 1400.0  # a slow model on a CPU is not ended for its first long prompt
    assert times.knows(1)
    assert not times.knows(1000)


def test_forwards_of_the_same_size_narrow_the_estimate() -> None:
    times = ForwardTimes()
    times.note(1, 1.4)
    times.note(1000, 140.0)
    assert times.longest_s(512) == times.longest_s(1) * 100 == 140.0
    assert 140.0 <= times.longest_s(1023) < 280.0


def test_a_forward_that_compiled_is_forgotten() -> None:
    times = ForwardTimes()
    times.note(16, 20.0)
    assert times.longest_s(16) == 20.0
    for _ in range(100):
        times.note(16, 0.01)
    assert times.longest_s(16) < 0.02
