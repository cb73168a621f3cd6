"""A catalogue of requests drawn from a seed: what the streams of a run ask for."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

_BEGINNINGS = (
    'def read_lines(path, encoding="utf-8"):\n',
    "class Stack:\n    def __init__(self):\n",
    "import os\nimport sys\n\ndef main(argv=None):\n",
    "def parse_header(line):\n    name, _, value =",
    "class TestQueue(unittest.TestCase):\n    def setUp(self):\n",
    "    def close(self):\n        if self._closed:\n            return\n",
    "try:\n    import threading\nexcept ImportError:\n",
    "def _format_usage(self, usage, actions, groups, prefix):\n    if prefix is None:\n",
    "async def wait_for(fut, timeout):\n    loop = events.get_running_loop()\n",
    "# Größe: überprüft\nnames = {'é': 1, '漢': 2}\nfor name in names:\n",
)
_STOPS = ("\n\n", "return", "self.", "    def ", "None")
_LENGTHS = (40, 60, 100, 150, 200, 300)
_DRAFT_LENGTHS = (None, None, 1, 2, 3, 4, 7)
_NARROW_TOP_K = 8
_GRAMMAR_CHANCE = 0.2
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "requires_registration": {"enum": ["yes", "no", None]},
        "name": {"type": "string", "maxLength": 40},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 2, "maxItems": 12},
        "parts": {"type": "array", "items": {"enum": ["small", "large"]}, "minItems": 4, "maxItems": 8},
    },
    "required": ["requires_registration", "name", "sizes", "parts"],
    "additionalProperties": False,
}
"""Schema of every request with a grammar: some of its text is forced, some is free."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of the catalogue."""

    number: int
    options: dict[str, Any]
    """Arguments of ``AsyncClient.stream``."""
    is_determined: bool
    """True if its tokens are the same whatever the draft does and however steps are cut: greedy, coupled, and rejection
    among one candidate. The others are seeded rejection, which repeats for the same draft lengths only."""
    max_rank: int | None = None
    """The largest rank an emitted token may have; None where it is not known."""

    @property
    def moves_ranks(self) -> bool:
        """True if the token that is emitted need not be one of the likeliest."""
        return any(key in self.options for key in _MOVES_RANKS)

    def __str__(self) -> str:
        return f"request {self.number}: {self.options}"


def draw_catalogue(rng: random.Random, count: int, *, longest: int = _LENGTHS[-1]) -> tuple[Request, ...]:
    """Catalogue of ``count`` distinct requests; none asks for more than ``longest`` tokens."""
    return tuple(_draw(rng, number, longest) for number in range(count))


def _draw(rng: random.Random, number: int, longest: int) -> Request:
    options: dict[str, Any] = {
        "prompt": _prompt(rng),
        "max_tokens": min(longest, rng.choice(_LENGTHS)),
        "ignore_eos": rng.random() < 0.9,
        "seed": rng.getrandbits(63),
        "num_speculative_tokens": rng.choice(_DRAFT_LENGTHS),
        **_extras(rng),
    }
    if rng.random() < _GRAMMAR_CHANCE:
        options = {key: value for key, value in options.items() if key not in _MAY_NOT_MATCH} | {"json_schema": SCHEMA}
    kind = rng.choices(("greedy", "coupled", "rejection of one", "rejection"), (40, 35, 10, 15))[0]
    if kind == "greedy":
        return Request(number, {**options, "temperature": 0.0}, is_determined=True)
    temperature = rng.choice((0.5, 0.8, 1.0))
    if kind == "coupled":
        drawn = {"temperature": temperature, "acceptance_method": "coupled", **_truncation(rng)}
        return Request(number, {**options, **drawn}, is_determined=True)
    if kind == "rejection of one":
        drawn = {"temperature": temperature, "acceptance_method": "rejection", "top_k": 1}
        return Request(number, {**options, **drawn}, is_determined=True)
    drawn = {"temperature": temperature, "acceptance_method": "rejection", "top_k": _NARROW_TOP_K, "logprobs": 0}
    if SCHEMA in options.values():
        return Request(number, {**options, **drawn}, is_determined=False)
    plain = {key: value for key, value in options.items() if key not in _MOVES_RANKS}
    return Request(number, {**plain, **drawn}, is_determined=False, max_rank=_NARROW_TOP_K)


_MOVES_RANKS = (
    *("repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias", "bad_words", "min_tokens"),
    "json_schema",
)
_MAY_NOT_MATCH = ("ignore_eos", "stop", "include_stop_str_in_output", "stop_token_ids", "min_tokens", "bad_words")
"""Parameters that end an output before it matches, or leave it no token."""


def _prompt(rng: random.Random) -> str:
    """One to thirty beginnings, up to some 500 tokens; most are short."""
    return "".join(rng.choices(_BEGINNINGS, k=rng.choice((1, 1, 1, 2, 4, 12, 30))))


def _extras(rng: random.Random) -> dict[str, Any]:
    """Rare parameters, each in some of the requests."""
    offered: tuple[tuple[float, dict[str, Any]], ...] = (
        (0.15, {"stop": rng.sample(_STOPS, 2)}),
        (0.05, {"include_stop_str_in_output": True}),
        (0.12, {"repetition_penalty": 1.15}),
        (0.1, {"frequency_penalty": 0.4, "presence_penalty": 0.2}),
        (0.15, {"logprobs": rng.choice((0, 1, 5))}),
        (0.1, {"min_tokens": rng.choice((5, 20))}),
        (0.05, {"logit_bias": {rng.randrange(2, 2000): rng.choice((-20.0, 3.0)) for _ in range(3)}}),
        (0.05, {"bad_words": ["self", "return"]}),
        (0.05, {"stop_token_ids": [rng.randrange(2, 2000) for _ in range(3)]}),
    )
    chosen: dict[str, Any] = {}
    for chance, options in offered:
        if rng.random() < chance:
            chosen |= options
    return chosen


def _truncation(rng: random.Random) -> dict[str, Any]:
    return rng.choice(({}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.05}))
