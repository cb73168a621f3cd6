"""Columns that keep less than plain steps have committed since their sessions were registered: they write no page that
can be found.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from outrider.ports import Prepare, Score, Scores
from outrider.prefix_hash import prefix_hash
from outrider.serving.decode import lookahead_steps
from outrider.transport.convert.commands import target_commands_from_proto, target_commands_to_proto
from outrider.types import SamplingParams, TokenScores
from outrider.v1 import link_pb2 as pb
from tests.serving.decode.test_twins import NUM_TOKEN_IDS, target_core
from tests.serving.decode.twins import Switch
from tests.support.core_driver import open_session

NUM_SESSIONS = 4
NUM_PLAIN = 13
PROMPT_LENGTH = 9


class _Caller:
    """Sessions of a target that are all asked the same."""

    def __init__(self, *, takes_batch: bool) -> None:
        self._switch = Switch()
        self.core, self._executor = target_core(
            self._switch, takes_batch=takes_batch, num_pages=600, max_batched_tokens=256
        )
        self._generation = 0
        self.texts = [[(7 * n + i) % 250 + 1 for i in range(PROMPT_LENGTH)] for n in range(NUM_SESSIONS)]
        self._held = [0] * NUM_SESSIONS
        self._found: dict[int, TokenScores] = {}
        self._send(
            [
                open_session(
                    n, prompt_length=PROMPT_LENGTH, max_length=300, num_token_ids=NUM_TOKEN_IDS,
                    generation=self._next(), sampling=SamplingParams(temperature=0.0), seed=n,
                )
                for n in range(NUM_SESSIONS)
            ]
        )  # fmt: skip

    def plain(self, credit: int | None = None) -> None:
        """One plain step of each."""
        items = [self._score(n, self._held[n]) for n in range(NUM_SESSIONS)]
        self._send(items)
        if credit is not None:
            self._send([Prepare(item.session, item.generation, credit) for item in items])
        self._answered()

    def _answered(self) -> None:
        """All have scores, whose first tokens are taken; no draft token is."""
        self._step()
        self._held = [len(text) for text in self.texts]
        for n, text in enumerate(self.texts):
            text.append(self._found[n].token_ids[0])

    def score_from(self, length: int, num_others: int, drafts: tuple[int, ...]) -> dict[int, TokenScores]:
        """Scores of drafts after ``length`` tokens and so many that are others than the text's."""
        for text in self.texts:
            text[length:] = [(token_id + 50) % 250 for token_id in text[length : length + num_others]]
        self._send([self._score(n, length, drafts) for n in range(NUM_SESSIONS)])
        self._answered()
        return dict(self._found)

    def _score(self, n: int, kept: int, drafts: tuple[int, ...] = ()) -> Score:
        text = self.texts[n]
        return Score(n, self._next(), kept, prefix_hash(text[:kept]), tuple(text[kept:]), drafts)

    def _next(self) -> int:
        self._generation += 1
        return self._generation

    def _send(self, commands: Sequence[object]) -> None:
        content = target_commands_to_proto(commands).SerializeToString()
        message = pb.TargetCommands.FromString(content)
        self.core.handle(0, target_commands_from_proto(message))

    def _step(self) -> None:
        self._found.clear()
        while self.core.has_work:
            self._switch.now_ns += 1_000_000
            for _, batch in self.core.step():
                events = [*batch.events]
                for batched in batch.batched:
                    events += batched.events(range(len(batched.sessions)))
                for event in events:
                    if isinstance(event, Scores) and isinstance(event.form, TokenScores):
                        self._found[event.session] = event.form
            self.core.post_step()


@pytest.mark.parametrize(("num_others", "num_drafts"), [(1, 5), (9, 1)])
def test_a_step_back_behind_committed_pages_leaves_them_alone(
    monkeypatch: pytest.MonkeyPatch, num_others: int, num_drafts: int
) -> None:
    monkeypatch.setattr(lookahead_steps, "FEWEST_SESSIONS", NUM_SESSIONS)
    found = []
    for takes_batch in (True, False):
        caller = _Caller(takes_batch=takes_batch)
        caller.plain(0)
        caller.plain(0)
        caller.plain(NUM_PLAIN)  # they join the plain chain, and are registered
        for _ in range(NUM_PLAIN):
            caller.plain()
        scores = caller.score_from(PROMPT_LENGTH + 2, num_others, tuple(range(3, 3 + num_drafts)))
        assert scores.keys() == set(range(NUM_SESSIONS))
        caller.core.executor.runner.sequences.check_integrity()  # type: ignore[attr-defined]
        for _ in range(8):  # pages are committed, and registered
            caller.plain()
        caller.core.executor.runner.sequences.check_integrity()  # type: ignore[attr-defined]
        found.append((scores, caller.texts))
    assert found[0] == found[1]
