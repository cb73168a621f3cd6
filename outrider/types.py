"""Values that every part of Outrider shares.

Owns what travels between the parts as plain Python and numpy: sampling parameters, evidence, scores, logprobs, facts of
a model. Knows no transport, no device and no configuration.

Shape letters: ``K`` draft length, ``S`` support width, ``V`` vocabulary.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from outrider.planes import PlaneReference
from outrider.values import step_value

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    FloatArray = NDArray[np.float32]
    IntArray = NDArray[np.int32]
else:  # names in annotations alone: the SDK works without numpy
    FloatArray = IntArray = Any


class AcceptanceMethod(enum.StrEnum):
    """The rule by which draft tokens are kept; temperature 0 is greedy under every rule."""

    REJECTION = "rejection"
    COUPLED = "coupled"
    TYPICAL = "typical"


class JudgingRule(enum.StrEnum):
    """Judging rule of a session: how its draft tokens are accepted, which decides what draft and target send for it.

    The coordinator derives it once from a request's acceptance method and temperature. A service follows it.
    """

    GREEDY = "greedy"
    """Both models take their likeliest token; the draft's is kept while it is the target's."""
    COUPLED = "coupled"
    """Both models draw with the same noise; the draft's token is kept while it is the target's."""
    REJECTION = "rejection"
    """Rejection sampling over the tokens that the draft drew from."""
    TYPICAL = "typical"
    """Typical acceptance."""

    @property
    def needs_evidence(self) -> bool:
        """True if a proposal says what its tokens were drawn from."""
        return self is JudgingRule.REJECTION


class LogprobsMode(enum.StrEnum):
    """Distribution of the logprobs: the model's own, or the one that was drawn from."""

    RAW = "raw"
    PROCESSED = "processed"


class FinishReason(enum.StrEnum):
    """Reason why a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


class GrammarKind(enum.StrEnum):
    """Form of a grammar."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Grammar:
    """Grammar that an output has to match; the output may end only where it matches as a whole."""

    kind: GrammarKind
    text: str
    """A JSON schema, a regular expression, a JSON list of texts, or a grammar in Lark's or llama.cpp's form."""
    after: str = ""
    """The grammar holds after the token in which this text, such as the end of reasoning, is complete. Empty: from the
    first token on."""

    @property
    def field(self) -> str:
        """Name of the field of requests that it comes from."""
        return "grammar" if self.kind is GrammarKind.LARK else self.kind.value


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of the distribution that a token is drawn from; defaults are vLLM's."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Nucleus mass in (0, 1]; 1 is off."""
    top_k: int = 0
    """Number of the likeliest tokens that are kept; 0 and -1 keep all."""
    min_p: float = 0.0
    """Tokens below this share of the largest probability are dropped, in [0, 1]; 0 is off."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens seen in prompt or output; above 0, 1 is off."""
    frequency_penalty: float = 0.0
    """Subtracted once for every time a token stands in the output, from -2 to 2."""
    presence_penalty: float = 0.0
    """Subtracted when a token stands in the output, from -2 to 2."""
    min_tokens: int = 0
    """Number of tokens before which end and stop tokens are banned."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit), from -100 to 100."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token runs that may not be completed."""
    allowed_token_ids: tuple[int, ...] = ()
    """Allowed tokens: when not empty, the only ones that may be drawn."""
    grammar: Grammar | None = None
    """Grammar that the output has to match."""


ID_BYTES = 4
"""Size of a packed token id."""


class PackedTokenIds(tuple[int, ...]):
    """Token ids with their bytes on the wire and their bounds, for a long prompt: it is checked, hashed and sent more
    than once.
    """

    packed: bytes
    """int32, little-endian."""
    least: int
    """No id is less."""
    largest: int
    """No id is larger."""

    @classmethod
    def known(cls, token_ids: Iterable[int], packed: bytes, least: int, largest: int) -> Self:
        """The same ids, of which all this is known."""
        found = cls(token_ids)
        found.packed, found.least, found.largest = packed, least, largest
        return found

    def part(self, start: int, stop: int) -> Self:
        """The ids from place ``start`` to ``stop``."""
        packed = self.packed[ID_BYTES * start : ID_BYTES * stop]
        return self.known(self[start:stop], packed, self.least, self.largest)


def pack_token_ids(token_ids: Sequence[int], start: int = 0, stop: int | None = None) -> bytes:
    """The ids from place ``start`` to ``stop`` as int32, little-endian; ``struct.error`` for one that does not fit."""
    stop = len(token_ids) if stop is None else stop
    if isinstance(token_ids, PackedTokenIds):
        return token_ids.packed[ID_BYTES * start : ID_BYTES * stop]
    part = token_ids[start:stop]
    return struct.pack(f"<{len(part)}i", *part)


def part_of(token_ids: tuple[int, ...], start: int, stop: int) -> tuple[int, ...]:
    """The ids from place ``start`` to ``stop``; packed ones stay packed."""
    if start == 0 and stop >= len(token_ids):
        return token_ids
    return token_ids.part(start, stop) if isinstance(token_ids, PackedTokenIds) else token_ids[start:stop]


def are_within(token_ids: Collection[int], least: int, largest: int) -> bool:
    """True if all ids are from ``least`` to ``largest``, without a loop of ours: they may be many."""
    if isinstance(token_ids, PackedTokenIds) and least <= token_ids.least and token_ids.largest <= largest:
        return True
    return not token_ids or (least <= min(token_ids) and max(token_ids) <= largest)


@step_value(frozen=True, slots=True)
class TokenLogprob:
    """The logprob of one token at one position."""

    token_id: int
    logprob: float
    rank: int
    """1 + how many tokens are strictly likelier."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob) of the likeliest, best first, as many as were asked for."""


@step_value(frozen=True, slots=True)
class CandidateLogprobs:
    """Logprobs of one position's candidates, before it is known which token is emitted there.

    Arrays, because a support has up to a thousand candidates at every position.
    """

    token_ids: IntArray  # [C] every token that may be emitted here, in no order
    logprobs: FloatArray  # [C]
    ranks: IntArray  # [C] 1 + how many tokens are strictly likelier
    top_token_ids: IntArray  # [N] the likeliest, best first
    top_logprobs: FloatArray  # [N]


@step_value(frozen=True, slots=True)
class SparseEvidence:
    """The distributions draft tokens were drawn from, row after row."""

    counts: IntArray  # [K] ids in each row
    token_ids: IntArray  # [sum(counts)] distinct in a row
    probs: FloatArray  # [sum(counts)] each row sums to 1


Evidence = SparseEvidence | None
"""Evidence for judging a proposal; None where the rule needs none (greedy, coupled, typical)."""


@step_value(frozen=True, slots=True)
class Support:
    """The ids, position by position, of which a target is asked the probabilities."""

    counts: IntArray  # [K]
    token_ids: IntArray  # [sum(counts)]


@step_value(frozen=True, slots=True)
class TokenScores:
    """Greedy and coupled: the target's own token at each position."""

    token_ids: tuple[int, ...]  # [K+1]


@step_value(frozen=True, slots=True)
class SparseScores:
    """Rejection: the target on the support, the mass outside it, and a token already drawn outside it."""

    support_probs: FloatArray  # [sum(counts)]
    outside_mass: FloatArray  # [K+1] the last row has an empty support
    outside_token_ids: IntArray  # [K+1] -1 when nothing is outside; the last is the bonus


@step_value(frozen=True, slots=True)
class TypicalScores:
    """Typical acceptance."""

    draft_token_probs: FloatArray  # [K]
    entropies: FloatArray  # [K] nats, with ln(p + 1e-5)
    argmax_token_ids: IntArray  # [K]
    bonus_token_id: int
    """Drawn at position K."""


ScoreForm = TokenScores | SparseScores | TypicalScores


SYNTHETIC_MARK, NOISE_MARK = " (synthetic)", " (noise)"
"""Suffixes of the name of an untrained model, so that its figures are not taken for those of a trained one."""


LAST_HIDDEN_STATE = -1
"""The layer id of what the head reads: the last layer's output, normalised."""
STATE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Types of hidden states, and the bytes of a value."""


@step_value(frozen=True, slots=True)
class HiddenStates:
    """Hidden states of consecutive positions of one session, the chosen layers' side by side: [N, F], row-major.

    A target makes them and a draft reads them; between the two they are bytes, or references to a plane.
    """

    start: int
    """The first position."""
    num_rows: int
    width: int
    """F: layers times the model's hidden size."""
    dtype: str
    """"float32", "bfloat16" or "float16", little-endian."""
    payload: bytes
    """``num_rows * width`` values; empty where there are references."""
    references: tuple[PlaneReference, ...] = ()
    """References to the rows, in order; each has whole rows."""
    tensor: Any = field(default=None, compare=False, repr=False)
    """[N, F] on the reader's device, once it has fetched the references. Never travels."""

    @property
    def num_bytes(self) -> int:
        """Size of all rows."""
        return sum(each.num_bytes for each in self.references) if self.references else len(self.payload)

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.start + self.num_rows

    def between(self, start: int, end: int) -> HiddenStates:
        """States of the positions from ``start`` to ``end`` - 1, which must be among them."""
        if (start, end) == (self.start, self.end):
            return self
        row_bytes = self.num_bytes // self.num_rows if self.num_rows else 0
        first, last = start - self.start, end - self.start
        return HiddenStates(
            start,
            end - start,
            self.width,
            self.dtype,
            self.payload[first * row_bytes : last * row_bytes],
            tuple(_parts(self.references, first * row_bytes, last * row_bytes)),
            None if self.tensor is None else self.tensor[first:last],
        )

    def followed_by(self, others: Sequence[HiddenStates]) -> HiddenStates:
        """States with those of the positions that follow, of the same layers and type; all inline or referenced."""
        if not others:
            return self
        payload = b"".join((self.payload, *(part.payload for part in others)))
        references = tuple(each for part in (self, *others) for each in part.references)
        num_rows = self.num_rows + sum(part.num_rows for part in others)
        return HiddenStates(self.start, num_rows, self.width, self.dtype, payload, references)


def _parts(references: Iterable[PlaneReference], begin: int, end: int) -> Iterator[PlaneReference]:
    """Parts of the references' bytes, taken one after the other, from ``begin`` to ``end`` - 1."""
    for each in references:
        if begin < each.num_bytes and end > 0:
            yield each.part(max(begin, 0), min(end, each.num_bytes))
        begin, end = begin - each.num_bytes, end - each.num_bytes


@dataclass(frozen=True, slots=True)
class StepCost:
    """Measured duration of one step of a service: of a target a forward that scores, of a draft a proposal."""

    num_rows: int
    """Sessions in the step."""
    num_tokens: int
    """Tokens of each session: of a target those of the forward, of a draft the draft tokens."""
    context_length: int
    """Tokens in the KV cache of each session."""
    duration_ns: int
    """Shortest of the measured durations."""


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Network address of a service."""

    address: str
    """host:port."""
    server_name: str = ""
    """Name in its certificate; empty: the host of the address."""


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """Description of a service and its model."""

    role: str
    """"draft" or "target"."""
    model_name: str
    architecture: str
    """Empty for a draft without a model."""
    vocab_size: int
    """Rows of the model's output, padding included; 0 for a draft without a model."""
    num_token_ids: int
    """Ids the tokenizer knows are below this; ids from here to ``vocab_size`` are never proposed or emitted. 0: any."""
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    """The id put before every prompt, if the tokenizer asks for one."""
    dtype: str = ""
    quantization: str = ""
    """Format of quantized weights, for people; empty: all weights are of the dtype."""
    batch_invariant: bool = False
    """True if a token's logits have the same bits in any batch."""
    device: str = ""
    device_id: str = ""
    """Id of its device, unique among hosts too; empty for a device that services cannot share."""
    device_name: str = ""
    """The GPU's, such as "NVIDIA H200"; empty on a CPU."""
    page_size: int = 0
    num_pages: int = 0
    tokenizer_files: dict[str, bytes] = field(default_factory=dict, repr=False)
    tokenizer_hash: str = ""
    """SHA-256 of what decides the ids; empty when there is no tokenizer."""
    acceptance_methods: tuple[AcceptanceMethod, ...] = tuple(AcceptanceMethod)
    version: str = ""
    tensor_parallel_size: int = 1
    """Processes that share the model, each with its part."""
    hidden_size: int = 0
    """Hidden state size of a target's layer. Of a draft that reads such: what its target must have. 0: not said, or
    none are read."""
    num_layers: int = 0
    """Number of a target's layers: it has hidden states 0, the embedding, to this, the last layer's, and
    ``LAST_HIDDEN_STATE``."""
    hidden_state_layers: tuple[int, ...] = ()
    """Layers whose hidden states a draft reads, as ``Open.hidden_state_layers`` has them."""
    longest_prefill: int = 0
    """Longest prefill of a draft, which computes the last tokens of a new text; 0: all."""
    plane_kinds: tuple[str, ...] = ()
    """Tensor planes that a target can offer, or that a draft can read, for hidden states; none: all travel inline."""
    channel_host: str = ""
    """Names the network of its host: a draft and a target where it is the same reach each other by loopback. Empty: it
    has no proposal channels."""
    peer_address: PeerAddress | None = None
    """Address by which the caller has reached it over the network. Never travels."""
    heartbeat_interval_ms: int = 0
    """Interval of its heartbeats on each link; 0: none, as in process, where no link falls silent."""
    step_costs: tuple[StepCost, ...] = field(default=(), repr=False)
    """Step times that the service measured when it started; empty: not measured."""
