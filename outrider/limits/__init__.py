"""Limits of the repeated and variable fields of requests and link messages: one table for the SDK, the public service
and both ends of a link.

The length of a field is checked before it is converted, copied or looped over. Every refusal is an
``InvalidRequestError`` that names the field, its count and the limit. The modules below keep to limits themselves:
reading of files and parsing of JSON. ``RateLimit`` is here because what runs a model imports no telemetry.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from outrider.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Bound:
    """The limit of a field, and the unit that is counted."""

    most: int
    unit: str

    def check(self, field: str, count: int) -> None:
        """Raise ``InvalidRequestError``, naming the field, the count and the limit, if ``count`` is above it."""
        if count > self.most:
            raise InvalidRequestError(field, f"has {count} {self.unit}; at most {self.most}")


MAX_SEED = (1 << 64) - 1
MAX_PRIORITY = (1 << 63) - 1
MAX_TOKENS = (1 << 31) - 1
MAX_LOGPROBS = 1024
"""The most that the setting ``max_logprobs`` can allow."""
MAX_DRAFT_LENGTH = 128
"""Draft tokens in one proposal: as many as vLLM allows."""

# Requests.
PROMPT_CHARACTERS = Bound(2_000_000, "characters")
"""Longer than any model's context, shorter than what a message may hold."""
PROMPT_TOKENS = Bound(1_000_000, "ids")
DETOKENIZED_TOKENS = Bound(1 << 17, "ids")
"""Decoding is one call that holds the interpreter lock: this number of ids takes some 25 ms."""
LOGIT_BIAS = Bound(1024, "entries")
STOP_TOKEN_IDS = Bound(1024, "ids")
ALLOWED_TOKEN_IDS = Bound(1 << 20, "ids")
"""Bound where the vocabulary is not known: above that of any model. A known vocabulary is the bound itself."""
STOP_TEXTS = Bound(64, "texts")
STOP_TEXT = Bound(4096, "characters in one text")
BAD_WORDS = Bound(1024, "entries")
BAD_WORD = Bound(4096, "characters in one word")
GRAMMAR_CHARACTERS = Bound(1 << 18, "characters")
GRAMMAR_AFTER = Bound(256, "characters")
BAD_WORDS_CHARACTERS = Bound(16 * BAD_WORD.most, "characters in all")
"""Every id of a bad word costs each hand that it passes through: more of them hold up other requests."""
BAD_WORDS_TOKENS = Bound(2 * BAD_WORDS_CHARACTERS.most, "token ids in all")
"""A text is banned in two forms, at the start and after a space."""
REQUEST_FIELDS = Bound(16_384, "fields")
"""Bound on the fields of a message with all that it holds: several times what the bounds above come to."""
UNUSED_BYTES = Bound(1 << 16, "bytes of unknown fields, or of fields that are given again")
"""Bound on a request's bytes without meaning, which are held until it is read."""
REQUEST_ID = Bound(256, "characters")
CACHE_SALT = Bound(256, "characters")
EMITTED = "resume.emitted_token_ids"
"""The field of the output that a generation goes on from."""
EMITTED_TOKEN_IDS = Bound(1_000_000, "ids")
CHAT_TEMPLATE = Bound(1 << 18, "characters")
CHAT_TEMPLATE_KWARGS = Bound(1 << 16, "characters of JSON")
JSON_VALUES = Bound(1 << 17, "lists, objects, names and separators of JSON")
"""Bound on one HTTP body without its lists of token ids, or one chat: parsing this number takes some 40 ms."""
MODEL_NAME = Bound(1024, "characters")
NAME_MESSAGE = Bound(4096, "bytes")
"""A message of health or reflection, which holds a name, or of a method that takes a hash or nothing."""

# Links. A bad word travels as up to two runs of tokens: at the start of a text and after a space.
LINK_BAD_WORDS = Bound(2 * BAD_WORDS.most, "entries")
LINK_ENDING_TOKEN_IDS = Bound(2 * STOP_TOKEN_IDS.most + 1, "ids")
"""Stop tokens of a request, and the model's own ends of sequence."""
LINK_BANNED_TOKEN_IDS = Bound(1024, "ids")
LINK_TOKEN_IDS = Bound(4 * PROMPT_TOKENS.most, "ids")
"""A session's tokens: its prompt and what came after it."""
LINK_HASH = Bound(64, "bytes")
"""A prefix hash or its key."""
LINK_DRAFT_TOKEN_IDS = Bound(MAX_DRAFT_LENGTH, "ids")
LINK_FIELDS = Bound(1 << 20, "fields")
"""Bound on the fields of one message: more than ``LINK_COMMANDS`` or ``LINK_ITEMS`` of any kind come to."""
LINK_COMMANDS = Bound(1 << 14, "items")
"""Commands in one message: sixteen for each of the sessions that a link has by default. More are sent as several."""
LINK_ITEMS = Bound(1 << 16, "items")
"""Events in one message."""
CHANNEL_PIECE = Bound((1 << 16) + 8, "bytes")
"""Message of a proposal channel between hosts."""
LINK_SUPPORT_IDS = Bound(1 << 22, "ids")
"""Bound on the support of all positions of one proposal: some tens of thousands for each."""
LINK_HIDDEN_LAYERS = Bound(16, "layers")
LINK_HIDDEN_STATE_BYTES = Bound(192 << 20, "bytes")
"""Bound on the hidden states of one session in one message; longer texts' states go in several."""
LINK_STATE_REFERENCES = Bound(4096, "references")
"""References to parts of one session's hidden states in one message."""
LINK_PAGES = Bound(1 << 26, "KV pages")
"""Bound on the pages of a peer; those of 63 peers together fit a field of 32 bits."""
LONGEST_RETRY_DELAY_MS = 1_000
"""Bound on the retry delay of a peer that has no room: a longer one counts as this. It may be a mistake, and no request
starts until it ends."""
LONGEST_STAGE_NS = 3_600_000_000_000
"""Bound on the time of a forward, or of a wait for one, as a peer reports it: an hour."""
LONGEST_STALL_LIMIT_MS = 3_600_000
"""Longest time that a peer may claim for one forward: an hour."""
LINK_PREPARED_STEPS = Bound(1 << 16, "steps")
LINK_LOGPROBS = Bound(MAX_LOGPROBS, "tokens asked for")
LINK_POSITIONS = Bound(MAX_DRAFT_LENGTH + 1, "positions")
LINK_CANDIDATES = Bound(1 << 20, "candidates of one position")
TENSOR_DIMENSIONS = Bound(2, "dimensions")
LINK_FILES = Bound(64, "files")
LINK_STEP_COSTS = Bound(1024, "step costs")
TOKENIZER_BYTES = Bound(128 << 20, "bytes in all")
"""The largest tokenizers have some 35 MB."""
LINK_TEXT = Bound(4096, "characters")
"""A name, a reason, an error's message."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits of the served model; the defaults apply to a model that is not known yet."""

    num_token_ids: int = ALLOWED_TOKEN_IDS.most
    max_model_len: int = PROMPT_TOKENS.most + 1

    def check_prompt(self, field: str, num_tokens: int) -> None:
        """Raise ``InvalidRequestError`` for a prompt that leaves no room for output."""
        most = self.max_model_len - 1
        if num_tokens > most:
            raise InvalidRequestError(field, f"has {num_tokens} tokens; at most {most} leave room for one of output")

    def check_emitted(self, num_prompt_tokens: int, num_emitted: int) -> None:
        """Raise ``InvalidRequestError`` for output that exceeds the model's length together with its prompt."""
        most = self.max_model_len - num_prompt_tokens
        if num_emitted > most:
            raise InvalidRequestError(EMITTED, f"has {num_emitted} ids; at most {most} fit the model after the prompt")

    def check_allowed(self, count: int) -> None:
        """Raise ``InvalidRequestError`` for more allowed ids than the vocabulary has."""
        if count > self.num_token_ids:
            raise InvalidRequestError(
                "allowed_token_ids", f"has {count} ids; at most {self.num_token_ids}, as many as the vocabulary"
            )


ANY_MODEL = ModelLimits()


class RateLimit:
    """Rate limit for log lines that clients can cause: ``burst`` of them every ``interval_s`` seconds. Not
    thread-safe.
    """

    def __init__(self, interval_s: float, *, burst: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s, self._burst = interval_s, burst
        self._clock = clock
        self._began: float | None = None
        """Time of the first logged line of this interval."""
        self._num_left = 0
        self._num_suppressed = 0

    def take(self) -> int | None:
        """Return the number of lines suppressed since the last one if this one may be logged, otherwise None."""
        now = self._clock()
        if self._began is None or now - self._began >= self._interval_s:
            self._began, self._num_left = now, self._burst
        if not self._num_left:
            self._num_suppressed += 1
            return None
        self._num_left -= 1
        suppressed, self._num_suppressed = self._num_suppressed, 0
        return suppressed
