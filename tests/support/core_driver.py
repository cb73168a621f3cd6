"""Drives a service's synchronous core as a coordinator would, without threads and without an event loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.ports import EventBatch, Extend, ForwardReport, Open, Opened, Prepare, Release, Score
from outrider.prefix_hash import prefix_hash
from outrider.serving.engine_core import EngineCore
from outrider.types import AcceptanceMethod, SamplingParams, Support
from outrider_coordinator.acceptance import judging_rule

GREEDY = SamplingParams(temperature=0.0)


def open_session(
    session: int = 0,
    *,
    prompt_length: int,
    max_length: int,
    num_token_ids: int,
    generation: int = 1,
    sampling: SamplingParams = GREEDY,
    seed: int = 11,
    acceptance_method: AcceptanceMethod = AcceptanceMethod.REJECTION,
    **more: Any,
) -> Open:
    return Open(
        session=session,
        generation=generation,
        sampling=sampling,
        seed=seed,
        judging_rule=judging_rule(acceptance_method, temperature=sampling.temperature),
        prompt_length=prompt_length,
        max_length=max_length,
        num_token_ids=num_token_ids,
        **more,
    )


def score_item(
    session: int,
    generation: int,
    tokens: Sequence[int],
    drafts: Sequence[int] = (),
    *,
    num_kept_tokens: int = 0,
    support: Support | None = None,
) -> Score:
    """``tokens`` are all committed ones; those from ``num_kept_tokens`` on are sent."""
    kept = prefix_hash(tokens[:num_kept_tokens])
    return Score(session, generation, num_kept_tokens, kept, tuple(tokens[num_kept_tokens:]), tuple(drafts), support)


def with_credit(item: Score, num_steps: int = 8) -> tuple[Score, Prepare]:
    """An item, and credit for plain steps after it."""
    return item, Prepare(item.session, item.generation, num_steps)


def extend_item(
    session: int, generation: int, tokens: Sequence[int], draft_length: int, *, num_kept_tokens: int = 0
) -> Extend:
    """``tokens`` are all committed ones; those from ``num_kept_tokens`` on are sent."""
    kept = prefix_hash(tokens[:num_kept_tokens])
    return Extend(session, generation, num_kept_tokens, kept, tuple(tokens[num_kept_tokens:]), draft_length)


@dataclass
class Driver:
    """One link to a core."""

    core: EngineCore[Any, Any, Any, Any]
    link_id: int = 0
    reports: list[ForwardReport] = field(default_factory=list)
    num_steps: int = 0
    opened: list[Opened] = field(default_factory=list)
    """Answers to ``Open``, which are not among the events that are returned."""

    def send(self, *commands: Open | Release | Score | Extend | Prepare) -> None:
        self.core.handle(self.link_id, commands)

    def step(self) -> list[Any]:
        """One step; this link's events."""
        self.num_steps += 1
        messages = self.core.step()
        self.core.post_step()
        return self._mine(messages)

    def run(self, *commands: Open | Release | Score | Extend | Prepare) -> list[Any]:
        """Send, and step until nothing is left to do; this link's events."""
        self.send(*commands)
        events: list[Any] = []
        while self.core.has_work:
            events += self.step()
        return events

    def one(self, *commands: Open | Release | Score | Extend | Prepare) -> Any:
        """The single answer to these commands."""
        (event,) = self.run(*commands)
        return event

    def _mine(self, batches: list[tuple[int, EventBatch[Any]]]) -> list[Any]:
        events: list[Any] = []
        for link_id, batch in batches:
            if link_id == self.link_id:
                self.opened += [event for event in batch.events if isinstance(event, Opened)]
                events += [event for event in batch.events if not isinstance(event, Opened)]
                for batched in batch.batched:
                    events += batched.events(range(len(batched.sessions)))
                if batch.report is not None:
                    self.reports.append(batch.report)
        return events
