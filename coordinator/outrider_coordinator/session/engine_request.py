"""Engine request: what a session generates, fixed at admission. Plain values."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.structured_output import Matcher
from outrider.types import AcceptanceMethod, LogprobsMode, SamplingParams
from outrider_coordinator.acceptance import JudgeRules


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A prepared request: tokenized, seeded, limited to the models."""

    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    """Most tokens to generate; prompt and these together fit the target."""
    sampling: SamplingParams
    seed: int
    acceptance_method: AcceptanceMethod
    rules: JudgeRules
    eos_token_ids: tuple[int, ...] = ()
    """Ends of sequence that count: none when they are ignored."""
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    num_speculative_tokens: int | None = None
    """The request's own draft length; None is the coordinator's."""
    draft_ahead: bool = True
    """Draft and target may begin its steps before they are asked for."""
    priority: int = 0
    """Place in the queue: lower is earlier."""
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    logprobs_mode: LogprobsMode = LogprobsMode.RAW
    request_id: str = ""
    skip_special_tokens: bool = True
    """True if the text is without special tokens."""
    cache_salt: str = ""
    prefix_hash_key: bytes = b""
    """Keys the session's prefix hashes, here and in the services; of one coordinator."""
    arrival_ns: int = 0
    """Arrival time of the request, in nanoseconds since 1970: no two requests of a coordinator have the same."""
    model_name: str = ""
    """The target's."""
    emitted_token_ids: tuple[int, ...] = ()
    """Output that was given out before, elsewhere, from which the session goes on."""
    matcher: Matcher | None = field(default=None, compare=False, repr=False)
    """Matcher of the grammar, at the beginning of the output."""
    tells_progress: bool = False
    """True if each delta says how far the call is."""

    @property
    def max_length(self) -> int:
        """Maximum length of the session in tokens."""
        return len(self.prompt_token_ids) + self.max_tokens

    @property
    def ending_token_ids(self) -> frozenset[int]:
        """Tokens that end the generation."""
        return frozenset(self.eos_token_ids + self.stop_token_ids)
