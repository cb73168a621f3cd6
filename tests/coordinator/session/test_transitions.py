"""Transitions of many sessions: commands and rows are those of the transitions of one; outputs stay the target's."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from outrider.batched import AnswerBatch, ExtendBatch, StateBatch, SupportBatch, token_scores
from outrider.benchmarks.step import turn
from outrider.benchmarks.step.stand_in import follow
from outrider.config import CoordinatorSettings
from outrider.demo import TARGET
from outrider.errors import IntegrityError
from outrider.generation import GenerationRequest
from outrider.planes import PlaneReference
from outrider.ports import EventBatch, Extend, Proposal, Score, Scores
from outrider.tokenization import TextTokenizer
from outrider.types import Grammar, GrammarKind, HiddenStates, SamplingParams, SparseEvidence, SparseScores
from outrider_coordinator.requests.batch_driver import BatchDriver
from outrider_coordinator.requests.step_ends import StepEnds
from outrider_coordinator.requests.taken_answers import TakenAnswers
from outrider_coordinator.service import Coordinator
from outrider_coordinator.session import actions
from outrider_coordinator.session import table_columns as col
from outrider_coordinator.session.actions import StepEnded
from outrider_coordinator.session.draft_side import DraftFacts
from outrider_coordinator.session.loop import SessionLoop
from outrider_coordinator.session.prepared_proposals import PreparedProposals
from outrider_coordinator.session.prepared_verdicts import PreparedVerdicts
from outrider_coordinator.session.table import SessionTable
from outrider_coordinator.session.transitions import PROPOSALS, SCORES, answered, end_step, end_wait, prepare
from outrider_coordinator.speculation import DraftLengthPolicy
from tests.coordinator.driving import make_plan
from tests.structured_output.vocabularies import letters
from tests.support.equality import one_by_one

VOCAB, NUM_SESSIONS = 12, 7
LETTERS = "abcdefghijk"


def as_batch(events: list[Any], make: Any) -> AnswerBatch[Any]:
    if isinstance(events[0], Scores) and isinstance(events[0].form, SparseScores):
        return sparse_batch_of(events)
    evidence = [event.evidence for event in events if isinstance(event, Proposal)]
    parts = [(one.counts, one.token_ids, one.probs) for one in evidence if isinstance(one, SparseEvidence)]
    supports = SupportBatch(*map(np.concatenate, zip(*parts, strict=True))) if parts else None
    rows = [event.token_ids if isinstance(event, Proposal) else event.form.token_ids for event in events]
    return AnswerBatch(
        np.array([event.session for event in events], dtype="<u8"),
        np.array([event.generation for event in events], dtype="<u8"),
        np.array([event.base_length for event in events], dtype="<u4"),
        np.array([len(row) for row in rows], dtype="<u4"),
        np.array([token_id for row in rows for token_id in row], dtype="<u4"),
        (),
        make,
        None,
        states_of(events),
        supports,
    )


def states_of(events: list[Any]) -> StateBatch | None:
    scores = [event for event in events if isinstance(event, Scores)]
    states = [event.hidden_states for event in scores if event.hidden_states is not None]
    return StateBatch.of(states) if 0 < len(states) == len(scores) else None


def sparse_batch_of(events: list[Any]) -> AnswerBatch[Any]:
    forms = [event.form for event in events]
    return AnswerBatch(
        np.array([event.session for event in events], dtype="<u8"),
        np.array([event.generation for event in events], dtype="<u8"),
        np.array([event.base_length for event in events], dtype="<u4"),
        np.array([form.outside_token_ids.size for form in forms], dtype="<u4"),
        np.concatenate([form.outside_token_ids for form in forms]),
        (),
        token_scores,
        np.concatenate([form.outside_mass for form in forms]),
        states_of(events),
        SupportBatch(
            np.array([form.support_probs.size for form in forms], dtype="<u4"),
            np.zeros(0, dtype=np.int32),
            np.concatenate([form.support_probs for form in forms]),
        ),
    )


def commands_of(loop: SessionLoop) -> list[Any]:
    taken = loop.take_actions()
    return [action.command for action in taken if isinstance(action, actions.ToDraft | actions.ToTarget)]


def answer(chance: random.Random, command: Extend | Score, *, is_sampled: bool = False) -> Proposal | Scores:
    """Mostly what is asked for; now and then of another text, generation or vocabulary, or fewer tokens."""
    base = command.num_kept_tokens + len(command.token_ids) - (chance.random() < 0.03)
    generation = command.generation - (chance.random() < 0.03)
    highest = VOCAB + (chance.random() < (0.005 if is_sampled else 0.05))
    if isinstance(command, Extend):
        count = command.draft_length - (chance.random() < 0.2)
        token_ids = tuple(chance.randrange(highest) for _ in range(max(0, count)))
        evidence = evidence_of(chance, token_ids) if is_sampled and token_ids else None
        return Proposal(command.session, generation, base, token_ids, evidence)
    if is_sampled:
        scores = Scores(command.session, generation, base, sparse_form(chance, command, highest))
    else:
        own = [token if chance.random() < 0.8 else chance.randrange(highest) for token in command.draft_token_ids]
        scores = token_scores(command.session, generation, base, (*own, chance.randrange(highest)))
    return scores if command.hidden_states_from is None else replace(scores, hidden_states=states_for(chance, command))


def states_for(chance: random.Random, command: Score) -> HiddenStates:
    """References to what is asked for; now and then a position late, or one too few."""
    start = (command.hidden_states_from or 0) + (chance.random() < 0.03)
    end = command.num_kept_tokens + len(command.token_ids) + len(command.draft_token_ids)
    num_rows = max(1, end - start - (chance.random() < 0.03))
    place = PlaneReference(bytes(16), 8 * chance.randrange(1000), 8 * num_rows, chance.randrange(1000))
    return HiddenStates(start, num_rows, 4, "bfloat16", b"", (place,))


def evidence_of(chance: random.Random, token_ids: tuple[int, ...]) -> SparseEvidence:
    """Supports of some ids each; now and then one that does not sum to 1, or lacks the token."""
    rows = [[token_id, *chance.sample([one for one in range(VOCAB) if one != token_id], chance.randrange(4))]
            for token_id in token_ids]  # fmt: skip
    weights = [[chance.random() + 0.01 for _ in row] for row in rows]
    probs = np.array([weight / sum(own) for own in weights for weight in own], dtype=np.float32)
    probs[0] += 0.5 * (chance.random() < 0.003)
    if chance.random() < 0.003:
        rows[0] = [(token_id + 1) % VOCAB for token_id in rows[0]]
    ids = np.array([token_id for row in rows for token_id in row], dtype=np.int32)
    return SparseEvidence(np.array(list(map(len, rows)), dtype=np.int32), ids, probs)


def sparse_form(chance: random.Random, command: Score, highest: int) -> SparseScores:
    """Sparse scores for rejection; now and then too much mass, or no token where there has to be one."""
    counts = [] if command.support is None else command.support.counts.tolist()
    inside: list[float] = []
    outside: list[float] = []
    for count in counts:
        own = [chance.random() + 0.01 for _ in range(count + 1)]
        own[-1] *= chance.random() < 0.7
        inside += [weight / sum(own) for weight in own[:-1]]
        outside.append(own[-1] / sum(own))
    outside.append(1.0 if chance.random() < 0.997 else 0.5)
    drawn = [chance.randrange(highest) if mass else -1 for mass in outside]
    drawn[-1] = -1 if chance.random() < 0.003 else drawn[-1]
    return SparseScores(
        np.array(inside, dtype=np.float32), np.array(outside, dtype=np.float32), np.array(drawn, dtype=np.int32)
    )


def new_loop(
    chance: random.Random, seed: int, policy: DraftLengthPolicy, *, temperature: float = 0.0, num_more: int = 0,
    layers: tuple[int, ...] = (), table: SessionTable | None = None, regex: str = "",
) -> SessionLoop:  # fmt: skip
    grammar = Grammar(GrammarKind.REGEX, regex)
    plan = make_plan(
        vocab_size=VOCAB,
        matcher=letters(LETTERS).compile(grammar, (len(LETTERS),)) if regex else None,
        prompt=(1,) * chance.choice((2, 240, 300)),
        max_tokens=chance.randrange(20, 90) + num_more,
        temperature=temperature,
        seed=seed,
        stop_token_ids=(5,) * chance.randrange(2),
        num_speculative_tokens=chance.choice((None, None, 0, 2)) if policy.is_controlled else None,
    )
    facts = DraftFacts(max_length=chance.choice((0, 280)), hidden_state_layers=layers)
    loop = SessionLoop(plan, policy, draft=facts, table=table)
    policy.enter(loop.speculation, "target")
    return loop


class Twins:
    """Sessions in a table, and the same ones by themselves, which only take the transitions of one session."""

    def __init__(
        self, chance: random.Random, num_sessions: int, length: int, *, is_controlled: bool = False, **more: Any
    ) -> None:
        state = chance.getstate()
        self.table = SessionTable()
        self.policies = [DraftLengthPolicy(length, is_controlled=is_controlled) for _ in range(2)]
        self.loops, self.alone = ([], [])  # type: tuple[list[SessionLoop], list[SessionLoop]]
        for loops, policy, table in zip((self.loops, self.alone), self.policies, (self.table, None), strict=True):
            chance.setstate(state)
            loops += [new_loop(chance, number, policy, table=table, **more) for number in range(num_sessions)]
        self.waiting: dict[int, Extend | Score] = {}
        """Newest item of each session, by its number."""
        for number, both in enumerate(zip(self.loops, self.alone, strict=True)):
            for loop in both:
                loop.start(number)
            self.note(number, *(with_text_brought(loop, commands_of(loop)) for loop in both))

    def note(self, number: int, said: list[Any], expected: list[Any]) -> None:
        """Comparison of a session's actions with those of the session alone."""
        assert repr(said) == repr(expected)  # arrays among the fields are no booleans
        assert self.loops[number].row.values.tolist() == self.alone[number].row.values.tolist()
        assert self.loops[number].proposal.token_ids == self.alone[number].proposal.token_ids
        assert self.loops[number].tokens.output == self.alone[number].tokens.output
        assert vars(self.loops[number].draft.states).keys() == vars(self.alone[number].draft.states).keys()
        assert repr(self.loops[number].draft.states.first_part()) == repr(self.alone[number].draft.states.first_part())
        sent = [command for command in expected if isinstance(command, Extend | Score)]
        self.waiting.pop(number, None)
        self.waiting |= {number: sent[-1]} if sent else {}
        for loop in (self.loops[number], self.alone[number]):  # the next answer is to set both to 0
            loop.target.losses = loop.draft.losses = 1

    def step_alone(self, event: Any) -> None:
        """An answer by the transitions of one session, for both."""
        both = self.loops[event.session], self.alone[event.session]
        said = []
        for loop in both:
            take = loop.on_draft_event if isinstance(event, Proposal) else loop.on_target_event
            take(event)
            said.append(with_text_brought(loop, commands_of(loop)))
        self.note(event.session, *said)

    def step_together(self, events: list[Any], batched: AnswerBatch[Any], **more: Any) -> set[int]:
        """Answers by the transitions of many, as far as they take them, and alone by those of one: whose they were."""
        by_number = {event.session: event for event in events}
        taken: set[int] = set()
        for found, own in self.found_for(batched):
            results = found.take(own, self.policies[0], **more)
            if results is None:
                continue
            token_ids = results.commit()
            commands = list(results.commands.items())
            numbers = [command.session for command in commands]
            taken |= set(numbers)
            ended: list[StepEnded] = []
            if results.num_tokens is None:
                for number in numbers:
                    end_wait(self.loops[number])
            else:
                ended = self.end_steps(found, own, results, token_ids or [])
            for place, (number, command) in enumerate(zip(numbers, commands, strict=True)):
                loop, alone = self.loops[number], self.alone[number]
                event = by_number[number]
                (alone.on_draft_event if isinstance(event, Proposal) else alone.on_target_event)(event)
                steps_alone = [action for action in alone.actions if isinstance(action, StepEnded)]
                assert steps_alone == [step._replace(token_ids=tuple(step.token_ids)) for step in ended[place:][:1]]
                plane = {"plane": 0} if isinstance(command, Score) else {}
                self.note(number, [replace(command, **plane), *commands_of(loop)], commands_of(alone))
        return taken

    def end_steps(self, found: Any, own: AnswerBatch[Any], results: Any, token_ids: list[list[int]]) -> list[StepEnded]:
        batch: Any = SimpleNamespace(prepared=found)
        taken = TakenAnswers(batch, results, own, results.indices, 0.0, 0.0, token_ids)
        sessions = [found.sessions[place] for place in results.indices]
        rows = zip(sessions, taken.steps(), own.states_at(results.indices), strict=True)
        is_drafting = isinstance(results.commands, ExtendBatch)
        return [end_step(session, step, states, is_drafting=is_drafting) for session, step, states in rows]

    def found_for(self, batched: AnswerBatch[Any]) -> Any:
        """Prepared answers of all, or of those on the spot whose answers are in order."""
        rows = self.table.indices(batched.sessions.tolist())
        whole = prepare(self.table, np.array(rows)) if min(rows) >= 0 else None
        if whole is not None and whole.is_of(batched):
            yield whole, batched
            return
        is_proposal = batched.make is Proposal
        for indices, found in answered(self.table, rows, batched, PROPOSALS if is_proposal else SCORES):
            yield found, batched.selected(indices)


@pytest.mark.parametrize("is_controlled", [False, True])
@pytest.mark.parametrize(
    ("length", "temperature", "layers", "num_sessions"),
    [
        (1, 0.0, (), NUM_SESSIONS),
        (4, 0.0, (), NUM_SESSIONS),
        (0, 0.0, (), NUM_SESSIONS),
        (0, 1.0, (), NUM_SESSIONS),
        (1, 1.0, (), NUM_SESSIONS),
        (4, 1.0, (), NUM_SESSIONS),
        (1, 0.0, (1, 3), NUM_SESSIONS),
        (4, 0.0, (1, 3), NUM_SESSIONS),
        (4, 1.0, (1, 3), NUM_SESSIONS),
        (1, 0.0, (), 1),
        (4, 0.0, (), 1),
        (1, 1.0, (), 1),
        (4, 1.0, (), 1),
        (4, 0.0, (1, 3), 1),
        (4, 1.0, (1, 3), 1),
        (0, 0.0, (), 1),
    ],
)
def test_many_sessions_do_what_each_does_alone(
    length: int, temperature: float, layers: tuple[int, ...], num_sessions: int, is_controlled: bool
) -> None:
    count = play(length, temperature, layers, num_sessions, is_controlled=is_controlled)
    assert count["alone"] and count["together"] > (40 if is_controlled else count["alone"] / 2), count


def play(
    length: int, temperature: float, layers: tuple[int, ...], num_sessions: int, *, is_controlled: bool = False
) -> Counter[str]:
    """A random load, by the table and by sessions alone: how many answers were taken in which way."""
    chance = random.Random(length)
    count: Counter[str] = Counter()
    for _ in range(5 * NUM_SESSIONS // num_sessions):
        more = {"temperature": temperature, "layers": layers, "num_more": 0 if length else 60}
        twins = Twins(chance, num_sessions, length, is_controlled=is_controlled, **more)
        while twins.waiting:
            kind = type(chance.choice(list(twins.waiting.values())))
            asked = [command for command in twins.waiting.values() if isinstance(command, kind)]
            chance.shuffle(asked)
            asked = asked[: chance.choice((1, len(asked), len(asked)))]
            events: list[Any] = [answer(chance, command, is_sampled=temperature > 0) for command in asked]
            together = [event for event in events if chance.random() < 0.9]
            with_states = [event for event in together if isinstance(event, Scores) and event.hidden_states is not None]
            together = with_states or together  # as columns hold them
            batched = as_batch(together, Proposal if kind is Extend else token_scores) if together else None
            plane = {"plane": 3} if kind is Extend else {}
            taken = set() if batched is None else twins.step_together(together, batched, **plane)
            count["together"] += len(taken)
            for event, command in zip(events, asked, strict=True):
                if event.session in taken:
                    assert event.generation == command.generation
                elif event.generation == command.generation:  # otherwise it is late, and the right one is to come
                    count["alone"] += 1
                    twins.step_alone(event)
    return count


def test_a_token_past_the_vocabulary_is_left_to_the_transitions_of_one() -> None:
    twins = Twins(random.Random(1), 2, 1)
    while scores := [command for command in twins.waiting.values() if isinstance(command, Score)]:
        for command in scores:
            base = command.num_kept_tokens + len(command.token_ids)
            twins.step_alone(token_scores(command.session, command.generation, base, (*command.draft_token_ids, 1)))
    asked = [twins.waiting[number] for number in range(2)]
    events = [
        Proposal(command.session, command.generation, command.num_kept_tokens + len(command.token_ids), (token_id,))
        for command, token_id in zip(asked, (VOCAB, VOCAB - 1), strict=True)
    ]
    found = answered(twins.table, twins.table.indices([0, 1]), as_batch(events, Proposal), PROPOSALS)
    assert [indices.tolist() for indices, _ in found] == [[1]]


def test_sessions_whose_grammar_forces_or_refuses_a_token_take_the_transitions_of_one() -> None:
    twins = Twins(random.Random(1), 4, 0, regex="([ab]|cdefedc)*")
    for token in "ab":
        for command in list(twins.waiting.values()):
            twins.step_alone(scores_of(command, token))
    events = [scores_of(command, token) for command, token in zip(twins.waiting.values(), "abcd", strict=True)]
    assert twins.step_together(events, as_batch(events, token_scores)) == {0, 1}
    twins.step_alone(events[2])
    forced = twins.waiting[2]
    assert isinstance(forced, Score) and forced.draft_token_ids == ids("defedc")
    with pytest.raises(IntegrityError, match="token 3 at output position"):
        twins.step_alone(events[3])


def test_grammars_of_many_sessions_are_followed_when_their_commands_have_left() -> None:
    twins = Twins(random.Random(1), 20, 0, regex="([ab]|cdefedc)*")
    for token in "ab":
        for command in list(twins.waiting.values()):
            twins.step_alone(scores_of(command, token))
    for tokens in ("abc" + "a" * 17, "abd" + "b" * 17):
        events = [scores_of(command, token) for command, token in zip(twins.waiting.values(), tokens, strict=True)]
        assert twins.step_together(events, as_batch(events, token_scores)) == set(range(20))
    refused = [scores_of(command, "d") for command in twins.waiting.values()]
    with pytest.raises(IntegrityError, match="token 3 at output position"):
        twins.step_together(refused, as_batch(refused, token_scores))


def ids(text: str) -> tuple[int, ...]:
    return tuple(map(LETTERS.index, text))


def scores_of(command: Extend | Score, text: str) -> Scores:
    base = command.num_kept_tokens + len(command.token_ids)
    return token_scores(command.session, command.generation, base, ids(text))


def changed_commands(monkeypatch: pytest.MonkeyPatch, field: str, change: Callable[[Any], Any]) -> None:
    """The drafts are asked for something else than the sessions would ask for."""
    take = PreparedVerdicts.take

    def wrong(self: PreparedVerdicts, *arguments: Any, **more: Any) -> Any:
        taken = take(self, *arguments, **more)
        if taken is not None:
            taken.commands = replace(taken.commands, **{field: change(getattr(taken.commands, field))})
        return taken

    monkeypatch.setattr(PreparedVerdicts, "take", wrong)


def changed_rows(monkeypatch: pytest.MonkeyPatch, column: int) -> None:
    """A number of a row is one too many after a step."""
    take = PreparedVerdicts.take

    def wrong(self: PreparedVerdicts, *arguments: Any, **more: Any) -> Any:
        taken = take(self, *arguments, **more)
        if taken is not None:
            commit = taken.commit

            def commit_wrongly() -> list[list[int]]:
                token_ids = commit()
                self.table.values[self.index[list(taken.indices)], column] += 1
                return token_ids

            taken.commit = commit_wrongly
        return taken

    monkeypatch.setattr(PreparedVerdicts, "take", wrong)


def late_answers_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_of(self: Any, answers: AnswerBatch[Any]) -> bool:
        return bool(answers.base_lengths.tobytes() == self.bases.tobytes())

    monkeypatch.setattr(PreparedVerdicts, "is_of", is_of)
    monkeypatch.setattr(PreparedProposals, "is_of", is_of)


MISTAKES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "one token more is kept": lambda patch: changed_commands(patch, "num_kept_tokens", lambda own: own + 1),
    "another prefix is hashed": lambda patch: changed_commands(patch, "hash_tails", lambda own: own ^ 1),
    "a generation is left out": lambda patch: changed_commands(patch, "generations", lambda own: own + 1),
    "a token less is asked for": lambda patch: changed_commands(patch, "draft_lengths", lambda own: own - 1),
    "another token is brought": lambda patch: changed_commands(patch, "token_ids", lambda own: own ^ 1),
    "the draft has the last token": lambda patch: changed_rows(patch, col.DRAFT_HELD),
    "one token more may come": lambda patch: changed_rows(patch, col.REMAINING),
    "the target holds one token more": lambda patch: changed_rows(patch, col.TARGET_HELD),
    "answers of earlier generations are taken": late_answers_taken,
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_random_loads_find_a_mistake(
    mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    with pytest.raises(AssertionError):
        play(4, 0.0, (), NUM_SESSIONS)


def with_text_brought(loop: SessionLoop, said: list[Any]) -> list[Any]:
    """Actions of a session, and those to a draft that prefills at once; of a text without states all but the last
    token, which waits for its state.
    """
    for command in said:
        if isinstance(command, Extend) and not command.draft_length:
            held = command.num_kept_tokens + len(command.token_ids)
            held -= loop.draft.reads_states and command.hidden_states is None
            loop.on_draft_event(Proposal(command.session, command.generation, held, ()))
    more = commands_of(loop)
    return [*said, *with_text_brought(loop, more)] if more else said


async def generate(coordinator: Coordinator, request: GenerationRequest, *, num_deltas: int | None) -> Any:
    token_ids: list[int] = []
    text = ""
    async for delta in coordinator.generate_stream(request):
        token_ids += delta.token_ids
        text += delta.text
        if delta.result is not None:
            assert (delta.result.text, delta.result.token_ids) == (text, tuple(token_ids))
            return delta.result.finish_reason, tuple(token_ids), delta.result.speculation, text
        if num_deltas is not None:
            num_deltas -= 1
            if not num_deltas:
                return "cancelled", tuple(token_ids), None, text
    raise AssertionError("a stream has no result")


async def outputs(
    *,
    draft_length: str = "fixed",
    lengths: tuple[int, ...] = (0, 1, 4, 7),
    temperatures: tuple[float, ...] = (0.0,),
    port: type[turn.WiredPort[Any, Any]] = turn.WiredPort,
) -> list[Any]:
    plan, times = turn.TurnPlan(acceptance=0.8), turn.StepTimes(0, 1)
    cores = {role: turn.timed_core(role, plan, times) for role in ("target", "draft")}
    target, draft = [port(core, role, times) for role, core in cores.items()]
    # A step whose draft is late goes on without it, and under rejection another schedule of draft lengths draws other
    # tokens of the same law: on a busy machine outputs would differ between two runs.
    settings = {"tokenizer": str(TARGET), "draft_length": draft_length, "draft_timeout_ms": 60_000}
    coordinator = Coordinator(target, draft, CoordinatorSettings.model_validate(settings))
    await coordinator.start()
    chance, tokenizer = random.Random(3), TextTokenizer.from_folder(TARGET)
    streams = []
    for number in range(16):
        prompt = tuple(chance.randrange(100) for _ in range(chance.choice((3, 250))))
        spoken = tokenizer.decode(follow(prompt[-1], 24)[21:])
        request = GenerationRequest(
            prompt_token_ids=prompt,
            max_tokens=chance.randrange(30, 160),
            sampling=SamplingParams(temperature=chance.choice(temperatures)),
            seed=number,
            stop_token_ids=(chance.randrange(2048),) if number % 3 else (),
            stop=("never said",) if number % 7 == 0 else (spoken,) if number % 5 == 1 else (),
            ignore_eos=True,
            num_speculative_tokens=chance.choice(lengths),
        )
        streams.append((request, generate(coordinator, request, num_deltas=5 if number == 4 else None)))
    found = await asyncio.gather(*(stream for _, stream in streams))
    await coordinator.close()
    for (request, _), (_, token_ids, _, _) in zip(streams, found, strict=True):
        if request.sampling.temperature and any(lengths):
            continue  # drafts of other ids are accepted
        assert token_ids == follow((request.prompt_token_ids or (0,))[-1], len(token_ids))
    return [one for one in found if one[0] != "cancelled"]


class _ItemLink(turn.WiredLink[Any, Any]):
    async def events(self) -> AsyncIterator[EventBatch[Any]]:
        async for batch in super().events():
            yield one_by_one(batch)


class _ItemPort(turn.WiredPort[Any, Any]):
    """Gives single items, as services of this process may."""

    async def attach(self) -> Any:
        link: Any = await super().attach()
        link.__class__ = _ItemLink
        return link


@pytest.mark.parametrize(
    ("lengths", "temperatures"),
    [
        ((1, 4, 7), (0.0,)),
        ((0, 1, 4), (0.0,)),
        ((0,), (0.0,)),
        ((0,), (1.0,)),
        ((4,), (1.0,)),
        ((0, 1, 4), (0.0, 1.0)),
        ((4,), (0.0, 1.0)),
    ],
)
async def test_outputs_and_counts_are_those_of_sessions_by_themselves(
    lengths: tuple[int, ...], temperatures: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the answers come: as columns, or one by one."""
    num_together = 0
    end_steps = StepEnds.end_steps

    def counted(self: StepEnds, *arguments: Any) -> None:
        nonlocal num_together
        num_together += len(arguments[-1].indices)
        end_steps(self, *arguments)

    monkeypatch.setattr(StepEnds, "end_steps", counted)
    with monkeypatch.context() as patched:
        for name in ("take_proposals", "take_scores"):
            patched.setattr(BatchDriver, name, lambda self, replica, batch, arrived: one_by_one(batch))
        alone = await outputs(lengths=lengths, temperatures=temperatures)
    assert not num_together
    for port in (turn.WiredPort, _ItemPort):
        assert await outputs(lengths=lengths, temperatures=temperatures, port=port) == alone
        assert num_together > 100
        num_together = 0


async def test_outputs_are_the_targets_own_where_lengths_are_controlled() -> None:
    assert len(await outputs(draft_length="auto")) == 15


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_single_user_with_drafts_is_served_as_columns_everywhere(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All steps but the prompt's and the first ones, which tell the services that the coordinator sends columns."""
    counts = Counter[Any]()
    start, start_step = turn.TimedExecutor.start, turn.TimedExecutor.start_step

    def one_by_one(self: Any, batch: Any) -> Any:
        counts["items"] += 1
        return start(self, batch)

    def as_one_batch(self: Any, step: Any, *batch: Any) -> Any:
        counts["columns", type(step.batched).__name__] += 1
        return start_step(self, step, *batch)

    monkeypatch.setattr(turn.TimedExecutor, "start", one_by_one)
    monkeypatch.setattr(turn.TimedExecutor, "start_step", as_one_batch)
    plan = {"num_sessions": (1,), "temperature": temperature, "num_samples": 30, "num_warmups": 5}
    await turn.run(turn.TurnPlan(**plan), 1)  # type: ignore[arg-type]
    scored, drafted = counts["columns", "ScoreBatch"], counts["columns", "ExtendBatch"]
    assert min(scored, drafted) > 30 and counts["items"] < 10
    counts.clear()
    await turn.run(turn.TurnPlan(**plan, num_speculative_tokens=0), 1)  # type: ignore[arg-type]
    assert counts["columns", "ScoreBatch"] > 30 and counts["items"] < 10
