"""Values of the public API: requests, deltas, results.

Plain values, shared by the SDK and the coordinator, without transport or text processing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from outrider.chat import ChatPrompt
from outrider.limits import MAX_TOKENS
from outrider.types import AcceptanceMethod, FinishReason, ModelDescription, SamplingParams, TokenLogprob
from outrider.values import step_value

TO_THE_END = MAX_TOKENS
"""``max_tokens`` that means as many as the model's length and the KV cache hold."""
DEFAULTABLE = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Sampling parameters that a model may have defaults of its own for."""


@dataclass(frozen=True, slots=True)
class Resumption:
    """The point at which an interrupted generation resumes."""

    emitted_token_ids: tuple[int, ...] = ()
    """The output so far, apart from the prompt."""
    model: str = ""
    """The target's name as ``Started`` told it; another one refuses. Empty: not compared."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A generation request. Exactly one of ``prompt``, ``prompt_token_ids`` and ``chat`` is set."""

    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    chat: ChatPrompt | None = None
    """A conversation, which the model's chat template makes a prompt of."""
    add_special_tokens: bool | None = None
    """Put around the prompt what the tokenizer puts around every text. None: around text, and not around a chat."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    max_tokens: int = TO_THE_END
    sampling: SamplingParams = field(default_factory=SamplingParams)
    defaulted: frozenset[str] = frozenset()
    """Sampling parameters that are left to the server, which may know the model's own defaults."""
    """Sampling parameters; ``bad_words`` stays empty here: words are text until the coordinator has tokenized them."""
    bad_words: tuple[str, ...] = ()
    seed: int | None = None
    """Keys every random stream, 0 to 2**64 - 1; drawn at random when None and told in the result."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    """Number of the likeliest tokens besides the emitted one; None computes nothing."""
    prompt_logprobs: int | None = None
    num_speculative_tokens: int | None = None
    """Draft length of this request; 0 turns speculation off, None is the coordinator's."""
    acceptance_method: AcceptanceMethod | None = None
    draft_ahead: bool = True
    """Let a draft and its target begin steps before they are asked for, as far as the coordinator does."""
    priority: int = 0
    """Place in the queue: lower is earlier. Only for coordinators with ``scheduling_policy: priority``."""
    request_id: str = ""
    cache_salt: str = ""
    """Work on prompts that was cached is shared only between requests of the same salt."""
    trace_parent: str = ""
    """The caller's span, as W3C's ``traceparent``; empty when there is none."""
    trace_state: str = ""
    """W3C's ``tracestate``, handed on as it is."""
    resumable: bool = False
    """A stream begins with ``Started``, and its deltas carry ``Progress`` a few times a second."""
    resume: Resumption | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """Values that the server chose for a resumable generation; the first message of its stream."""

    seed: int
    prompt_token_ids: tuple[int, ...] | None
    """The prompt as ids where the request gave text, else None."""
    max_tokens: int
    """Trimmed to the model's length; emitted tokens included."""
    acceptance_method: AcceptanceMethod
    request_id: str
    model: str
    """The target's name."""
    num_emitted_tokens: int
    """Number of tokens that the call goes on from."""
    sampling: Mapping[str, float | int] = field(default_factory=dict)
    """Sampling parameters that the request left to the server, and the values in use."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int = 0
    """Prompt tokens that the target found in its prefix cache and did not compute again."""


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Speculation statistics of one request."""

    num_steps: int
    """Scoring passes, the prefill's included."""
    num_draft_tokens: int
    num_accepted_tokens: int
    num_judged_tokens: int
    """Drafted tokens without those after the first rejection of a step, which are discarded without being judged."""
    acceptance_histogram: tuple[int, ...]
    """Entry j: steps, among those that had a proposal, in which j tokens were accepted."""
    mean_acceptance_length: float
    """Tokens gained per step with a proposal, recovered or bonus included; 0 when there was none."""
    num_forced_tokens: int = 0
    """Proposed because the grammar forces them. They count as no draft tokens."""
    num_accepted_forced_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Time of some steps by stage, in seconds."""

    draft: float = 0.0
    target: float = 0.0
    accept: float = 0.0
    wire: float = 0.0


@dataclass(frozen=True, slots=True)
class Timing:
    """Times since the arrival of the request, and the time of its steps by stage, in seconds."""

    queue: float
    first_token: float
    total: float
    draft: float = 0.0
    """The draft service's own time, summed over steps."""
    target: float = 0.0
    """The target service's own time, summed over steps."""
    accept: float = 0.0
    """Time in the coordinator, for accepting or rejecting draft tokens, summed over steps."""
    wire: float = 0.0
    """Waiting for either service less its own time, summed over steps."""
    paused: float = 0.0
    """Time without new tokens because the reader did not read."""
    prefill: StageTimes = StageTimes()
    """The part of ``draft``, ``target``, ``accept`` and ``wire`` up to the first token. The draft's own prefill may
    come later, in the steps that decode."""
    grammar: float = 0.0
    """Time to compile the grammar of the request, or to find it compiled, before it waits."""
    mask: float = 0.0
    """Time in which the services made masks of the grammar beside their forwards, summed over steps."""
    num_drafts_ahead: int = 0
    """Proposals that the draft had begun before the coordinator asked for them."""


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """A finished generation."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    matched_stop: int | str | None
    """The token id or the text that stopped it."""
    logprobs: tuple[TokenLogprob, ...] | None
    """One for each output token when asked for; a server leaves out those that were resumed from."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None
    """One for each prompt token when asked for; the first has none."""
    usage: Usage
    speculation: SpeculationStats
    seed: int
    request_id: str
    timing: Timing
    trace_id: str = ""
    """The trace it is part of, in hex; empty when it is part of none."""


@step_value(frozen=True, slots=True)
class Progress:
    """Progress of one call of a resumable stream."""

    speculation: SpeculationStats
    timing: Timing


@step_value(frozen=True, slots=True)
class Delta:
    """New output. The last one of a stream carries the result."""

    text: str
    """Text that these tokens and those before them made final, and nothing of later ones."""
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    result: GenerationResult | None = None
    started: Started | None = None
    """Start of a resumable stream: the first delta, without output, which the SDK keeps to itself, and ``progress``."""
    progress: Progress | None = None


@dataclass(frozen=True, slots=True)
class ModelPlacement:
    """Device and KV cache of a replica."""

    device: str = ""
    """Device of its first process, such as "cpu" or "cuda:0"; empty for a draft without a model."""
    device_name: str = ""
    """The GPU's, such as "NVIDIA H200"; empty on a CPU."""
    tensor_parallel_size: int = 1
    """Processes that share the model, each with a device of its own."""
    dtype: str = ""
    """Type of weights and KV cache."""
    page_size: int = 0
    """Tokens in a KV page; 0 without a model."""
    num_pages: int = 0
    quantization: str = ""
    """Format of quantized weights; empty: all weights are of the dtype."""
    batch_invariant: bool = False
    """True if a token's logits have the same bits in any batch."""

    @classmethod
    def of(cls, description: ModelDescription) -> ModelPlacement:
        """Build it from a service's description."""
        return cls(
            device=description.device,
            device_name=description.device_name,
            tensor_parallel_size=description.tensor_parallel_size,
            dtype=description.dtype,
            quantization=description.quantization,
            batch_invariant=description.batch_invariant,
            page_size=description.page_size,
            num_pages=description.num_pages,
        )

    @property
    def kv_cache_tokens(self) -> int:
        """Total number of tokens in the KV cache."""
        return self.page_size * self.num_pages


NOWHERE = ModelPlacement()
"""Placement of a model that is not there."""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The files that make the served model's tokenizer and chat templates."""

    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """Name -> content; empty where the caller knows them already."""
    bos_token_id: int | None = None
    """The id put before every text, if the tokenizer asks for one."""
    sha256: str = ""
    """Hash of all names and contents, in hex."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about the served models."""

    target_model: str
    draft_model: str
    """Empty when there is none."""
    max_model_len: int
    num_token_ids: int
    eos_token_ids: tuple[int, ...]
    num_speculative_tokens: int
    acceptance_method: AcceptanceMethod
    draft_attached: bool
    version: str
    num_running: int
    num_waiting: int
    target_pages_free: int
    """Free KV pages, up to half a second old."""
    draft_pages_free: int
    """Free pages of the draft."""
    draft_length_mode: str = "fixed"
    """Source of a step's draft length: auto (expected throughput) or fixed."""
    draft_length: float = 0.0
    """Draft length that running sessions are given now, on average; 0 while decoding is plain."""
    target_placement: ModelPlacement = NOWHERE
    """Placement of the first target that is attached; others may differ."""
    draft_placement: ModelPlacement = NOWHERE
    """Placement of the draft."""
    tensor_planes: tuple[str, ...] = ()
    """Transport of hidden states to drafts that read them: a line for each target and draft, with the reasons against
    other planes. Empty where none are read."""
    draft_length_reason: str = ""
    """Reason why running requests draft or do not; empty while none runs, with fixed lengths, or without a draft."""
    exports_traces: bool = False
    """True if the coordinator exports the spans of traced requests."""
