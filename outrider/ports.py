"""The seam: what a coordinator asks of a draft and a target, in process or over the wire.

Two ports, ``Draft`` and ``Target``, each with ``describe`` and ``attach``. An attached link is a duplex of typed
messages; closing it releases its sessions. The services implement the ports in process, ``outrider.transport``
implements them again over gRPC, and a coordinator cannot tell them apart.

State goes by length: ``num_kept_tokens`` is how many tokens of the session to keep, ``token_ids`` the committed tokens
after them; an answer's ``base_length`` is both together. Each item sent to a session has a higher ``generation`` than
the one before; a reply carries it back. The .proto files say the same, field by field.

Knows no transport, no device, no thread.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from outrider.errors import InvalidRequestError
from outrider.planes import PlaneOffer, PlaneReport
from outrider.prefix_hash import PrefixHash
from outrider.stalls import Stall
from outrider.types import (
    CandidateLogprobs,
    Evidence,
    HiddenStates,
    JudgingRule,
    LogprobsMode,
    ModelDescription,
    PeerAddress,
    SamplingParams,
    ScoreForm,
    Support,
)
from outrider.values import step_value

if TYPE_CHECKING:
    from outrider.batched import AnswerBatch


@dataclass(frozen=True, slots=True)
class Open:
    """Opens a session, or opens it anew: all that a service must know to give the same answers as any other."""

    session: int
    generation: int
    sampling: SamplingParams
    seed: int
    judging_rule: JudgingRule
    prompt_length: int
    max_length: int
    """Most tokens the session will ever hold."""
    num_token_ids: int
    """Ids that may be drawn are below this."""
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that ``min_tokens`` bans: ends of sequence and stop tokens."""
    banned_token_ids: tuple[int, ...] = ()
    """Tokens that are never drawn. The coordinator sends none: ids below ``num_token_ids`` without a token keep their
    probability.
    """
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    logprobs_mode: LogprobsMode = LogprobsMode.RAW
    request_id: str = ""
    trace_id: str = ""
    """Trace id, which like the one above is for the service's log alone."""
    prefix_hash_key: bytes = b""
    """Keys the session's prefix hashes."""
    cache_salt: str = ""
    """Cached KV is shared only with sessions of the same salt."""
    arrival_ns: int = 0
    """Arrival time of the request in nanoseconds since 1970; the same for a session that is rebuilt. When pages run
    out, the session that arrived last is preempted."""
    hidden_state_layers: tuple[int, ...] = ()
    """A target: the layers whose hidden states a ``Score`` may ask for. Layer i is the residual stream after i layers,
    0 the embedding, ``LAST_HIDDEN_STATE`` what the head reads."""
    in_turn: bool = False
    """True if nothing may be begun on a guess or a verdict before its command has come."""


@dataclass(frozen=True, slots=True)
class Release:
    """Ends a session."""

    session: int
    generation: int


@dataclass(frozen=True, slots=True)
class Rejected:
    """A command that broke a bound of the wire, as a service receives it: its session fails, others are unharmed."""

    session: int
    generation: int
    error: InvalidRequestError


@step_value(frozen=True, slots=True)
class Extend:
    """Brings a draft session up to date and asks for a proposal of up to ``draft_length`` tokens, possibly 0."""

    session: int
    generation: int
    num_kept_tokens: int
    prefix_hash: PrefixHash
    """Hash of the first ``num_kept_tokens`` tokens; if it is not that of the service's text, the answer is
    ``SessionLost``."""
    token_ids: tuple[int, ...]
    draft_length: int
    trace_parent: str = ""
    hidden_states: HiddenStates | None = None
    """Hidden states for a draft that reads them: of the positions from the last kept token (or 0) to the last but one
    that it will then hold. None: it takes what it can hold without, and its answer's ``base_length`` says how much that
    is.
    """
    channel: int = 0
    """Channel as in ``ExtendBatch``, of which it was one. It never travels."""


@step_value(frozen=True, slots=True)
class Score:
    """Brings a target session up to date and asks what it says of K+1 positions."""

    session: int
    generation: int
    num_kept_tokens: int
    prefix_hash: PrefixHash
    token_ids: tuple[int, ...]
    """Draft tokens, at least one."""
    draft_token_ids: tuple[int, ...] = ()  # [K]
    support: Support | None = None
    """Support for sparse rejection with K > 0; None otherwise."""
    trace_parent: str = ""
    hidden_states_from: int | None = None
    """Hidden states are wanted of all positions from this one on, the scored ones included; at least
    ``num_kept_tokens``. None: of none."""
    plane: int = 0
    """The connection of the tensor plane by which the states go, as ``RequestPlane`` numbered it; 0: inline."""
    is_direct: bool = False
    """True if the draft tokens came by a proposal channel. Never travels."""


@dataclass(frozen=True, slots=True)
class Prepare:
    """Lets a target compute the next ``num_steps`` plain steps after a ``Score`` before they are asked for.

    It has no answer of its own: answers are held until a ``Score`` asks for just that. Any other ``Score`` ends it.
    """

    session: int
    generation: int
    """Generation of the ``Score`` that it follows, the newest; otherwise it is ignored."""
    num_steps: int
    """Replaces what is left of an earlier ``Prepare``."""


@dataclass(frozen=True, slots=True)
class RequestPlane:
    """Asks a target to offer a draft its tensor plane. Answered with ``OfferPlane``."""

    connection: int
    """A number above 0 that no other connection of the link ever had."""


@dataclass(frozen=True, slots=True)
class OfferPlane:
    """A target's offer of a tensor plane, which the coordinator brings to one draft."""

    connection: int
    """Connection number on the target's link; on the draft's, a number of that link."""
    offer: PlaneOffer


@dataclass(frozen=True, slots=True)
class ClosePlane:
    """Ends a connection of the tensor plane, or takes its offer back."""

    connection: int


@dataclass(frozen=True, slots=True)
class PlaneChosen:
    """Result of a connection: the plane that the target has chosen, anew when one fails; or that it has ended."""

    connection: int
    report: PlaneReport
    is_closed: bool = False
    """The connection has ended, or could not be made."""


@dataclass(frozen=True, slots=True)
class RequestChannel:
    """Asks a target to offer a draft a proposal channel. Answered with ``OfferChannel``."""

    connection: int
    """A number above 0 that no other connection of the link ever had."""
    wants_verdicts: bool = False
    """The target sends its verdicts on direct proposals to the draft by the channel."""
    begins_next: bool = False
    """The target begins a session's next step by itself, with what the draft has pushed."""


@dataclass(frozen=True, slots=True)
class OfferChannel:
    """A target's offer of a proposal channel, which the coordinator brings to one draft as it is."""

    connection: int
    offer: PlaneOffer
    num_outcomes: int = 0
    """Outcomes of a target's step for which the draft prepares proposals and pushes them, at most: the coordinator's
    say. 1: a chain; 0: it waits to be asked."""
    target: PeerAddress | None = None
    """Address of a target on another host, from the coordinator; None: loopback."""


@dataclass(frozen=True, slots=True)
class CloseChannel:
    """Ends a proposal channel, or takes its offer back."""

    connection: int


@dataclass(frozen=True, slots=True)
class ChannelState:
    """State of a proposal channel."""

    connection: int
    is_open: bool
    reason: str = ""
    """Reason why it has ended, or could not be made."""


@step_value(frozen=True, slots=True)
class Proposal:
    """The answer to ``Extend``: K draft tokens, possibly fewer than asked for, possibly none."""

    session: int
    generation: int
    base_length: int
    """Committed tokens it builds on: the Extend's ``num_kept_tokens + len(token_ids)``."""
    token_ids: tuple[int, ...]  # [K]
    evidence: Evidence = None


@step_value(frozen=True, slots=True)
class Scores:
    """The answer to ``Score``."""

    session: int
    generation: int
    base_length: int
    """Committed tokens it builds on: the Score's ``num_kept_tokens + len(token_ids)``, where position 0 is."""
    form: ScoreForm
    logprobs: tuple[CandidateLogprobs, ...] = ()  # [K+1] when wanted (with DenseScores: its own rows instead)
    prompt_logprobs: tuple[CandidateLogprobs, ...] = ()  # of the prompt tokens brought, the session's first left out
    hidden_states: HiddenStates | None = None
    """Hidden states, if asked for, of the positions that were not sent as ``HiddenStateChunk`` before, up to the last
    draft token's."""
    draft_token_ids: tuple[int, ...] = ()
    """The draft tokens that were scored, if they came by a proposal channel."""
    goes_on: bool = False
    """The target begins the next step by itself: a ``Score`` without draft tokens claims it."""


@step_value(frozen=True, slots=True)
class HiddenStateChunk:
    """Hidden states of a part of a ``Score``'s positions, sent before its answer: prompts are long."""

    session: int
    generation: int
    """Generation of the ``Score``."""
    states: HiddenStates


@dataclass(frozen=True, slots=True)
class Opened:
    """The answer to ``Open``, once the session's first item has said what its text is."""

    session: int
    generation: int
    """The Open's."""
    num_cached_tokens: int
    """Leading tokens of the text whose KV the prefix cache held."""


@dataclass(frozen=True, slots=True)
class Preempted:
    """The session's pages were needed for older sessions: it has ended, and may be opened again when there is room."""

    session: int
    generation: int
    retry_after_ms: int


@dataclass(frozen=True, slots=True)
class SessionLost:
    """The service holds less than ``num_kept_tokens`` or another text: open again and send it all from 0."""

    session: int
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class SessionFailed:
    """A session that cannot go on; the others are unharmed."""

    session: int
    generation: int
    code: str
    """The error's class name in ``outrider.errors``."""
    message: str
    field: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """No room: on a draft it means K = 0, on a target it ends admission."""

    session: int
    generation: int
    retry_after_ms: int
    reason: str


@step_value(frozen=True, slots=True)
class ForwardReport:
    """Costs of the forward behind a batch of events, by the service's own clock."""

    queue_ns: int
    forward_ns: int
    sample_ns: int
    total_ns: int
    batch_size: int
    num_tokens: int
    num_pages_free: int
    ended_ns: int = 0
    """End of the last forward: messages with the same one have answers of the same forward. 0: not told."""
    num_other_rows: int = 0
    """Rows of other links, whose sessions belong to other coordinators, in the forwards since the link's last report:
    of each of them those in the forward with most of its rows."""
    num_other_drafts: int = 0
    """Draft tokens of those rows."""


@step_value(frozen=True, slots=True)
class ItemTiming:
    """Stages of one item's time, by the service's own clock.

    Each of the first four lies between readings of the clock of its own, where one ends and the next begins; so they
    add up.
    """

    queue_ns: int
    """Time from its arrival to its first forward."""
    forward_ns: int
    sample_ns: int
    wait_ns: int
    """Time between its forwards and after the last: others' forwards, bookkeeping, the answer's way out of the engine.
    """
    total_ns: int
    """Time from its arrival to the answer."""
    mask_ns: int = 0
    """Time in which the masks of its forwards were made, beside the model's work."""

    @property
    def numbers(self) -> tuple[int, int, int, int, int, int]:
        """The fields in their order, as they travel."""
        return self.queue_ns, self.forward_ns, self.sample_ns, self.wait_ns, self.total_ns, self.mask_ns


DraftCommand = Open | Extend | Release
TargetCommand = Open | Score | Prepare | Release
DraftEvent = Proposal | Opened | Preempted | SessionLost | SessionFailed | Refused
TargetEvent = Scores | HiddenStateChunk | Opened | Preempted | SessionLost | SessionFailed | Refused
PlaneCommand = RequestPlane | OfferPlane | ClosePlane
"""Plane command, which belongs to no session and travels in a message of its own."""
PlaneEvent = OfferPlane | PlaneChosen
"""Events about planes."""
ChannelCommand = RequestChannel | OfferChannel | CloseChannel
"""Commands about channels."""
ChannelEvent = OfferChannel | ChannelState
"""Events about channels."""
PeerCommand = PlaneCommand | ChannelCommand
PeerEvent = PlaneEvent | ChannelEvent
"""Events about the connections of a target to a draft."""

CommandT_contra = TypeVar("CommandT_contra", contravariant=True)
EventT_co = TypeVar("EventT_co", covariant=True)


@step_value(frozen=True, slots=True)
class EventBatch(Generic[EventT_co]):
    """Events in order, and what they cost (None when no forward was needed)."""

    events: tuple[EventT_co, ...]
    report: ForwardReport | None = None
    timings: tuple[ItemTiming, ...] = ()
    """Timings of the item behind each event; empty when no forward was needed."""
    batched: tuple[AnswerBatch[EventT_co], ...] = ()
    """Further events, of the same forward: one for each form of answers. They come after the events."""

    @classmethod
    def of(
        cls,
        timed: Sequence[tuple[EventT_co, ItemTiming | None]],
        report: ForwardReport | None,
        batched: Sequence[AnswerBatch[EventT_co]] = (),
    ) -> EventBatch[EventT_co]:
        """A batch of events with their times, of which its receiver may not know some."""
        timings: Any = tuple([timing for _, timing in timed])
        return cls(tuple([event for event, _ in timed]), report, timings, tuple(batched))

    @property
    def sessions_in_batch(self) -> list[int]:
        """Sessions of the events that are arrays."""
        return [session for batched in self.batched for session in batched.sessions.tolist()]

    def all_events(self) -> tuple[EventT_co, ...]:
        """The events, those of the arrays among them."""
        return (*self.events, *(event for each in self.batched for event in each.events(range(len(each.sessions)))))

    def timed(self) -> Iterator[tuple[EventT_co, ItemTiming | None]]:
        """Each event with its item's time."""
        return zip(self.events, self.timings or itertools.repeat(None), strict=False)


class Link(Protocol[CommandT_contra, EventT_co]):
    """A duplex of messages: ordered, lossless, and gone as a whole."""

    @property
    def num_pages_free(self) -> int | None:
        """Free KV pages of the service, as last reported to this end; None before any report."""
        ...

    @property
    def stall(self) -> Stall:
        """Time for which the service has made no progress, as far as this end was notified."""
        ...

    def send(self, commands: Sequence[CommandT_contra]) -> None:
        """Queues one message and returns at once; raises UnavailableError when the link is gone."""
        ...

    def events(self) -> AsyncIterator[EventBatch[EventT_co]]:
        """The answers, to one reader; ends after ``close``, raises UnavailableError when the link breaks."""
        ...

    async def close(self) -> None:
        """Releases the link's sessions on the service; idempotent."""
        ...


DraftLink = Link[DraftCommand, DraftEvent]
TargetLink = Link[TargetCommand, TargetEvent]


class Draft(Protocol):
    """A small model, or none, that proposes."""

    async def describe(self) -> ModelDescription:
        """Facts of the draft; raises UnavailableError when it cannot be reached."""
        ...

    async def attach(self) -> DraftLink:
        """Opens a link; raises UnavailableError when it cannot be reached."""
        ...


class Target(Protocol):
    """The large model, that scores."""

    async def describe(self) -> ModelDescription:
        """Facts of the target; raises UnavailableError when it cannot be reached."""
        ...

    async def attach(self) -> TargetLink:
        """Opens a link; raises UnavailableError when it cannot be reached."""
        ...
