"""Token rules of a session: which tokens may never be drawn, which are moved and which may not end a word.

Worked out once for an ``Open`` and a vocabulary and kept on the device, so that a forward loops over no list of a
request. Owns how many are remembered.

Shape letters: ``V`` vocabulary, ``E`` entries.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.ports import Open

MOST_REMEMBERED_BYTES = 32 << 20
"""Of masks, on each device; past it the first is forgotten, and worked out anew if its session goes on."""


@dataclass(frozen=True, slots=True)
class TokenRules:
    """One session's."""

    open: Open
    """Kept, so that no other has its identity."""
    banned: Tensor | None  # [V] bool: not allowed, banned, or a bad word by itself
    ending_ids: Tensor | None  # [E] int64: banned below the minimum length
    bias: tuple[Tensor, Tensor] | None  # [E] int64 distinct ids, [E] float32
    bad_words: dict[int, list[tuple[tuple[int, ...], int]]]
    """Those of several tokens, as (all but the last, the last), by their last token but one."""

    def completed(self, tokens: Sequence[int], start: int, length: int) -> list[int]:
        """Last tokens of the bad words that end in ``tokens[start:length]`` but for it."""
        words = self.bad_words.get(tokens[length - 1], ()) if length > start else ()
        return [
            last
            for beginning, last in words
            if length - start >= len(beginning) and tuple(tokens[length - len(beginning) : length]) == beginning
        ]


class _RememberedRules:
    """By the identity of the ``Open``; safe to use from the threads of several engines."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int, torch.device], TokenRules] = {}
        self._num_bytes = 0
        self._lock = threading.Lock()

    def __call__(self, open_: Open, vocab_size: int, device: torch.device) -> TokenRules:
        key = id(open_), vocab_size, device
        known = self._found.get(key)
        if known is None:
            known = _work_out(open_, vocab_size, device)
            with self._lock:
                self._remember(key, known)
        return known

    def _remember(self, key: tuple[int, int, torch.device], rules: TokenRules) -> None:
        self._found[key] = rules
        self._num_bytes += _size(rules)
        while self._num_bytes > MOST_REMEMBERED_BYTES and len(self._found) > 1:
            self._num_bytes -= _size(self._found.pop(next(iter(self._found))))


rules_of = _RememberedRules()
"""The rules of a session for a vocabulary, on a device."""


def _size(rules: TokenRules) -> int:
    sampling = rules.open.sampling
    num_entries = len(sampling.logit_bias) + len(rules.open.eos_token_ids) + sum(map(len, sampling.bad_words))
    return 16 * num_entries + 8 * len(sampling.allowed_token_ids) + (0 if rules.banned is None else len(rules.banned))


def _work_out(open_: Open, vocab_size: int, device: torch.device) -> TokenRules:
    words = [word for word in open_.sampling.bad_words if len(word) > 1]
    by_last_but_one: dict[int, list[tuple[tuple[int, ...], int]]] = {}
    for word in words:
        if 0 <= word[-1] < vocab_size:
            by_last_but_one.setdefault(word[-2], []).append((word[:-1], word[-1]))
    ending = _known(open_.eos_token_ids if open_.sampling.min_tokens else (), vocab_size)
    return TokenRules(
        open=open_,
        banned=_banned(open_, vocab_size, device),
        ending_ids=torch.from_numpy(ending).to(device) if ending.size else None,
        bias=_bias(open_, vocab_size, device),
        bad_words=by_last_but_one,
    )


def _banned(open_: Open, vocab_size: int, device: torch.device) -> Tensor | None:
    sampling = open_.sampling
    single = [word[0] for word in sampling.bad_words if len(word) == 1]
    never = _known([*open_.banned_token_ids, *single], vocab_size)
    if not sampling.allowed_token_ids and not never.size:
        return None
    mask = np.full(vocab_size, bool(sampling.allowed_token_ids))
    mask[_known(sampling.allowed_token_ids, vocab_size)] = False
    mask[never] = True
    return torch.from_numpy(mask).to(device)


def _bias(open_: Open, vocab_size: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
    biases: dict[int, float] = {}
    for token_id, bias in open_.sampling.logit_bias:
        if 0 <= token_id < vocab_size:
            biases[token_id] = biases.get(token_id, 0.0) + bias
    if not biases:
        return None
    ids = torch.tensor(list(biases), dtype=torch.int64, device=device)
    return ids, torch.tensor(list(biases.values()), dtype=torch.float32, device=device)


def _known(token_ids: Iterable[int], vocab_size: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Those the vocabulary has: a draft's may be smaller than the one a request was checked against."""
    ids = np.fromiter(token_ids, dtype=np.int64)
    return ids[(ids >= 0) & (ids < vocab_size)]
