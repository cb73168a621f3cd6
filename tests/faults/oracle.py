"""Twins: what each request gives when nothing disturbs it, and the comparison of a stream with its twin.

Owns what "different" means. A determined request has to give its twin's tokens, text and reason to end. Seeded
rejection is held to what its parameters allow, since a late draft changes which random stream decides.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.errors import OutriderError
from outrider.generation import GenerationResult
from outrider.types import FinishReason, TokenLogprob
from tests.faults.requests import Request

_LOGPROB_TOLERANCE = 0.02
"""Five positions in one forward and five forwards of one round differently in float32."""
_TIE = 1e-4
"""Ten times as much as that rounding moves a log-probability."""


@dataclass(slots=True)
class Reading:
    """Messages that one reader of one stream has seen."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    result: GenerationResult | None = None
    error: OutriderError | None = None
    is_hung: bool = False
    """Nothing came for so long that the reader gave up."""
    was_left: bool = False
    """The reader went away, or its deadline passed, as was planned."""
    first_output_s: float = 0.0
    """The wait for the first output."""
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """(seconds, clock at their end) of the longest waits between outputs."""


def is_near_tie(request: Request, twin: GenerationResult) -> bool:
    """True if two tokens were as likely anywhere in a greedy twin, so that the shape of a forward decides between them.

    The twin has the two likeliest. Where parameters move the ranks it is not known.
    """
    is_greedy = request.options["temperature"] == 0.0 or request.options.get("top_k") == 1
    if not is_greedy or request.moves_ranks or twin.logprobs is None:
        return False
    return any(len(each.top) > 1 and each.top[0][1] - each.top[1][1] < _TIE for each in twin.logprobs)


def differences(reading: Reading, twin: GenerationResult | None) -> list[str]:
    """Differences of a stream from its reference, in words. ``twin`` is None for free requests."""
    found = [*_against_itself(reading)]
    if twin is not None:
        found += _against_twin(reading, twin)
    if reading.request.max_rank is not None:
        ranks = [entry.rank for entry in reading.logprobs]
        if any(rank > reading.request.max_rank for rank in ranks):
            found.append(f"a token of rank {max(ranks)} where {reading.request.max_rank} is the last candidate")
    return found


def _against_itself(reading: Reading) -> list[str]:
    """Deltas make up the result; the result obeys the request's own limits."""
    found: list[str] = []
    options, result = reading.request.options, reading.result
    if len(reading.token_ids) > options["max_tokens"]:
        found.append(f"{len(reading.token_ids)} tokens of {options['max_tokens']}")
    if reading.logprobs and [entry.token_id for entry in reading.logprobs] != reading.token_ids:
        found.append("logprobs of other tokens")
    if result is None:
        return found
    if tuple(reading.token_ids) != result.token_ids:
        found.append(f"deltas bring {len(reading.token_ids)} tokens, the result {len(result.token_ids)} others")
    if "".join(reading.texts) != result.text:
        found.append("deltas bring another text than the result")
    if result.finish_reason is FinishReason.CANCELLED:
        found.append("ended as cancelled, which nobody asked for")
    if "json_schema" in options and result.finish_reason is FinishReason.STOP and not _matches(result.text, options):
        found.append(f"a text that does not match its schema: {result.text[-60:]!r}")
    if result.finish_reason is FinishReason.LENGTH and len(result.token_ids) != options["max_tokens"]:
        found.append(f"ended for length after {len(result.token_ids)} tokens of {options['max_tokens']}")
    return found


def _matches(text: str, options: Mapping[str, Any]) -> bool:
    import jsonschema  # streams without grammars are compared where it is not installed

    try:
        jsonschema.validate(json.loads(text), options["json_schema"])
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def _against_twin(reading: Reading, twin: GenerationResult) -> list[str]:
    common = len(reading.token_ids)
    if tuple(reading.token_ids) != twin.token_ids[:common]:
        place = _first_difference(reading.token_ids, twin.token_ids)
        return [
            f"another token at {place}: {reading.token_ids[place : place + 4]}, not {twin.token_ids[place : place + 4]}"
        ]
    result = reading.result
    if result is None:
        return [] if twin.text.startswith("".join(reading.texts)) else ["another text for the same tokens"]
    found = []
    if result.token_ids != twin.token_ids:
        found.append(f"ended after {len(result.token_ids)} tokens, not {len(twin.token_ids)}")
    if result.text != twin.text:
        found.append(f"another text: {result.text[-40:]!r}, not {twin.text[-40:]!r}")
    if (result.finish_reason, result.matched_stop) != (twin.finish_reason, twin.matched_stop):
        found.append(f"ended by {result.finish_reason} {result.matched_stop!r}, not {twin.finish_reason}")
    if _counts(result) != _counts(twin):
        found.append(f"counts {result.usage}, not {twin.usage}")
    return found + _logprobs_against(result, twin)


def _counts(result: GenerationResult) -> tuple[int, int]:
    """Counts without the tokens that a prefix cache held, which are others each time."""
    return result.usage.prompt_tokens, result.usage.completion_tokens


def _logprobs_against(result: GenerationResult, twin: GenerationResult) -> list[str]:
    if twin.logprobs is None or result.logprobs is None:
        return [] if twin.logprobs is result.logprobs else ["logprobs on one side alone"]
    if len(result.logprobs) != len(twin.logprobs):
        return [f"{len(result.logprobs)} logprobs, not {len(twin.logprobs)}"]
    pairs = zip(result.logprobs, twin.logprobs, strict=True)
    off = max((abs(ours.logprob - theirs.logprob) for ours, theirs in pairs), default=0.0)
    return [f"logprobs differ by {off:.3f}"] if off > _LOGPROB_TOLERANCE else []


def _first_difference(ours: list[int], theirs: tuple[int, ...]) -> int:
    both = zip(ours, theirs, strict=False)
    return next((place for place, (one, other) in enumerate(both) if one != other), min(len(ours), len(theirs)))
