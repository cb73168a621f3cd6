"""The two services of a coordinator: what is accepted as target and as draft, and what follows when one comes or goes.

Owns both attachments and how long a lost target is waited for. Knows no sessions: a listener is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from coordinator.attachment import Attachment
from coordinator.pair import check_pair
from coordinator.sides import DraftFacts
from outrider.errors import OutriderError, PairMismatchError, UnavailableError
from outrider.ports import Draft, DraftCommand, DraftEvent, EventBatch, Target, TargetCommand, TargetEvent
from outrider.types import ModelDescription


class Listener(Protocol):
    """Told what the services say, and that they come and go."""

    def on_target_batch(self, batch: EventBatch[TargetEvent]) -> None:
        """Events of the target."""

    def on_draft_batch(self, batch: EventBatch[DraftEvent]) -> None:
        """Events of the draft."""

    def target_attached(self) -> None:
        """The target is there, for the first time or again."""

    def target_lost(self) -> None:
        """The target's link is gone."""

    def target_given_up(self, error: OutriderError) -> None:
        """The target was not back in time."""

    def draft_attached(self) -> None:
        """The draft is there, for the first time or again."""

    def draft_lost(self) -> None:
        """The draft's link is gone."""


class Services:
    """A target and, where there is one, a draft, kept attached."""

    def __init__(
        self,
        target: Target,
        draft: Draft | None,
        listener: Listener,
        *,
        on_model: Callable[[ModelDescription], None],
        target_timeout_s: float,
    ) -> None:
        """``on_model`` sees each target before it is attached, and raises what speaks against it."""
        self._listener = listener
        self._on_model = on_model
        self._target_timeout_s = target_timeout_s
        self._target_known = asyncio.Event()
        self._give_up_timer: asyncio.TimerHandle | None = None
        self.has_given_up = False
        """Whether the target is not waited for any more."""
        self.target: Attachment[TargetCommand, TargetEvent] = Attachment(
            target,
            "target",
            accept=self._accept_target,
            on_attached=self._target_attached,
            on_batch=listener.on_target_batch,
            on_lost=self._target_lost,
        )
        self.draft: Attachment[DraftCommand, DraftEvent] | None = None
        if draft is not None:
            self.draft = Attachment(
                draft,
                "draft",
                accept=self._accept_draft,
                on_attached=listener.draft_attached,
                on_batch=listener.on_draft_batch,
                on_lost=listener.draft_lost,
            )

    async def start(self) -> None:
        """Attach to the target, however long that takes, and try the draft once; raises what waiting will not mend."""
        self.target.start()
        if self.draft is not None:
            self.draft.start()
        await self.target.first_try()
        await self._target_known.wait()
        if self.draft is not None:
            await self.draft.first_try()

    async def close(self) -> None:
        """Give back what both services hold."""
        self.stop_waiting()
        if self.draft is not None:
            await self.draft.close()
        await self.target.close()

    def stop_waiting(self) -> None:
        """A lost target is not given up any more."""
        if self._give_up_timer is not None:
            self._give_up_timer.cancel()
            self._give_up_timer = None

    def require_target(self) -> ModelDescription:
        """Facts of the target; ``UnavailableError`` as long as none has been attached."""
        if self.target.description is None:
            raise UnavailableError("no target has been attached yet")
        return self.target.description

    def draft_facts(self) -> DraftFacts | None:
        """Facts of the draft, None while none can be reached."""
        if self.draft is None or not self.draft.is_up or self.draft.description is None:
            return None
        return DraftFacts(self.draft.description.max_model_len, self.draft.description.num_token_ids)

    async def _accept_target(self, description: ModelDescription) -> None:
        known = self.target.description
        if known is not None and (known.tokenizer_hash, known.num_token_ids) != (
            description.tokenizer_hash,
            description.num_token_ids,
        ):
            raise PairMismatchError(
                f"the target came back as another model, {description.model_name}: sessions of {known.model_name}"
                " cannot go on there"
            )
        self._on_model(description)

    def _target_attached(self) -> None:
        self._target_known.set()
        self.stop_waiting()
        self.has_given_up = False
        self._listener.target_attached()

    def _target_lost(self) -> None:
        self.stop_waiting()
        self._give_up_timer = asyncio.get_running_loop().call_later(self._target_timeout_s, self._give_up)
        self._listener.target_lost()

    def _give_up(self) -> None:
        self.has_given_up = True
        self._listener.target_given_up(UnavailableError(f"the target was not back after {self._target_timeout_s:g} s"))

    async def _accept_draft(self, description: ModelDescription) -> None:
        await self._target_known.wait()
        check_pair(self.require_target(), description)
