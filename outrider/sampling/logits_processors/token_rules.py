"""Token rules of a session: banned tokens, logit biases, end tokens before the minimum length, and bad words.

They are built once for an ``Open`` and a vocabulary and stay on the device with the session, so that a forward reads no
list of a request.

Shape letters: ``V`` vocabulary, ``E`` entries.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.ports import Open
from outrider.sampling.logits_processors.bad_words import BadWords


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Token rules of one session, on a device."""

    banned: Tensor | None  # [V] bool: not allowed, banned, or a bad word by itself
    ending_ids: Tensor | None  # [E] int64: banned below the minimum length
    bias: tuple[Tensor, Tensor] | None  # [E] int64 distinct ids, [E] float32
    bad_words: BadWords
    """Bad words of several tokens."""

    @classmethod
    def of(cls, open_: Open, vocab_size: int, device: torch.device) -> TokenRules:
        """Build the rules of a session for a vocabulary, on a device."""
        ending = _known(open_.eos_token_ids if open_.sampling.min_tokens else (), vocab_size)
        return cls(
            banned=_banned(open_, vocab_size, device),
            ending_ids=torch.from_numpy(ending).to(device) if ending.size else None,
            bias=_bias(open_, vocab_size, device),
            bad_words=BadWords(
                word for word in open_.sampling.bad_words if len(word) > 1 and 0 <= word[-1] < vocab_size
            ),
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
    """Ids within the vocabulary: a draft's may be smaller than the one that the request was checked against."""
    ids = np.fromiter(token_ids, dtype=np.int64)
    return ids[(ids >= 0) & (ids < vocab_size)]
