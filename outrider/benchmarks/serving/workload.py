"""Workload: prompts of a given length, and the time at which each is sent.

Owns prompts and arrival times, the same for the same seed. Knows no client and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

import outrider
from outrider.errors import ConfigError

Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Arrival of requests."""

    request_rate: float = math.inf
    """Requests a second on average; infinite: all at once."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of the gaps: 1 is a Poisson process, less is burstier, more is steadier."""
    max_concurrency: int | None = None
    """Most requests under way; the others wait here, and their time has not begun."""

    def __post_init__(self) -> None:
        if not self.request_rate > 0:
            raise ConfigError("request_rate", f"must be above 0, not {self.request_rate}")
        if not self.burstiness > 0:
            raise ConfigError("burstiness", f"must be above 0, not {self.burstiness}")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError("max_concurrency", f"must be at least 1, not {self.max_concurrency}")


def require_capacity(prompts: Sequence[Prompt], num_tokens: int, max_model_len: int) -> None:
    """``ConfigError`` when a request would be cut short by the model's length."""
    longest = max(map(len, prompts))
    if longest >= max_model_len:
        raise ConfigError("input_len", f"must be below {max_model_len}, the model's length, not {longest}")
    if longest + num_tokens > max_model_len:
        raise ConfigError(
            "output_len",
            f"must be at most {max_model_len - longest} after {longest} tokens of prompt, not {num_tokens}: "
            f"the model's length is {max_model_len}",
        )


def arrival_times(traffic: Traffic, num_requests: int, seed: int) -> list[float]:
    """Due time of each request, in seconds after the first."""
    if math.isinf(traffic.request_rate):
        return [0.0] * num_requests
    scale = 1.0 / (traffic.request_rate * traffic.burstiness)
    gaps = np.random.default_rng(seed).gamma(traffic.burstiness, scale, size=num_requests)
    return [0.0, *np.cumsum(gaps)[:-1].tolist()][:num_requests]


def random_prompts(num_prompts: int, length: int, num_token_ids: int, seed: int) -> list[Prompt]:
    """Prompts of uniformly random ids."""
    _check(num_prompts, length)
    ids = np.random.default_rng(seed).integers(0, num_token_ids, size=(num_prompts, length))
    return [tuple(row) for row in ids.tolist()]


def code_prompts(num_prompts: int, length: int, tokenizer: Path, seed: int) -> list[Prompt]:
    """Stretches of Outrider's own Python source: code that no model was trained on before it was written."""
    _check(num_prompts, length)
    ids = _tokenize(tokenizer, _source())
    if len(ids) <= length:
        raise ConfigError("input_len", f"must be below {len(ids)}, the tokens of the source, not {length}")
    starts = np.random.default_rng(seed).integers(0, len(ids) - length, size=num_prompts)
    return [tuple(ids[start : start + length]) for start in starts.tolist()]


def _check(num_prompts: int, length: int) -> None:
    for name, value in (("num_prompts", num_prompts), ("input_len", length)):
        if value < 1:
            raise ConfigError(name, f"must be at least 1, not {value}")


def _source() -> str:
    package = Path(outrider.__file__).parent
    files = sorted(path for path in package.rglob("*.py") if path.parent.name != "v1")
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


def _tokenize(folder: Path, text: str) -> Sequence[int]:
    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise ConfigError("tokenizer", f"{path} cannot be read: {error}") from error
    return list(tokenizer.encode(text, add_special_tokens=False).ids)
