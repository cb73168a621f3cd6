"""Layout of the row parameters and the results of ``draft_sampling``, as arrays of 32-bit numbers.

Shape letters: ``B`` rows, ``K`` steps, ``S`` maximum number of tokens in a support.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

import torch

from outrider.randomness.streams import Stream, split_seed

MAX_BANNED = 8
"""Token ids that a row may exclude one by one."""
ALWAYS = 2**31 - 1
"""The ``until`` of a token that is never drawn."""


class Method(enum.IntEnum):
    """Sampling method of a row."""

    NONE = 0
    """No sampling: the row fills up a shape."""
    GREEDY = 1
    COUPLED = 2
    SPARSE = 3
    """Sampling from a support of the likeliest tokens, which is reported."""
    CUT_COUPLED = 4
    """Coupled, among the tokens that top-p, top-k and min-p leave."""
    GROUPED = 5
    """A guess of what a target draws that shares this row's seed and base: its draw in two stages, uncut."""


class DrawColumn(enum.IntEnum):
    """Index of each parameter of a row."""

    METHOD = 0
    TEMPERATURE = 1
    """The bits of a float32 above 0."""
    SEED_LOW = 2
    SEED_HIGH = 3
    STREAM = 4
    BASE = 5
    POSITION = 6
    """Position of the token that is drawn next."""
    LENGTH = 7
    """Tokens that this row is still to draw; 0 or less: none."""
    NUM_IDS = 8
    """Tokens from here on are never drawn."""
    MIN_P = 9
    """The bits of a float32; 0 cuts nothing."""
    TOP_K = 10
    """0 cuts nothing."""
    TOP_P = 11
    """The bits of a float32; 1 cuts nothing."""
    NUM_BANNED = 12
    BANNED = 13
    """The first of ``MAX_BANNED`` token ids."""
    UNTIL = 21
    """The first of ``MAX_BANNED`` positions from which on the token of the same place may be drawn."""
    NEXT_BASE = 29
    """Base of the tokens after the next, which are drawn by ``SPARSE`` from the stream ``PROPOSAL``; 0: all are drawn
    as the next."""


NUM_COLUMNS = DrawColumn.NEXT_BASE + 1


class Field(enum.IntEnum):
    """Index of each number of a record."""

    TOKEN = 0
    """-1: none could be drawn."""
    WIDTH = 1
    """Tokens of the support; 0 where there is none."""
    IS_FINITE = 2
    """True if all raw logits of the row are."""
    LARGEST = 3
    """The bits of the largest processed logit, a float32."""


NUM_FIELDS = len(Field)

_HOTTEST = float(torch.finfo(torch.float32).max)
_AS_THEY_ARE, _AS_INTEGERS = struct.Struct("=IIfff"), struct.Struct("=iiiii")
_UNCUT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RowParameters:
    """One row's parameters."""

    method: Method
    temperature: float
    seed: int
    stream: Stream
    base: int
    position: int
    length: int
    num_ids: int
    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    banned: tuple[tuple[int, int], ...] = ()
    """(token id, position from which on it may be drawn)."""
    next_base: int = 0

    def to_numbers(self) -> list[int]:
        """[NUM_COLUMNS], each as an int32."""
        low, high = split_seed(self.seed)
        ids, untils = [token_id for token_id, _ in self.banned], [until for _, until in self.banned]
        padding = [0] * (MAX_BANNED - len(ids))
        low, high, temperature, min_p, top_p = _AS_INTEGERS.unpack(
            _AS_THEY_ARE.pack(low, high, min(self.temperature, _HOTTEST), self.min_p, self.top_p)
        )
        return [
            int(self.method), temperature, low, high, int(self.stream), self.base, self.position, self.length,
            self.num_ids, min_p, min(self.top_k, _UNCUT), top_p, len(ids), *ids, *padding, *untils, *padding,
            self.next_base,
        ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class DraftSink:
    """Destination of a loop's draws; those of step k at index k."""

    step: torch.Tensor  # [1] int32: k
    next_ids: torch.Tensor  # [B] int32: the drawn token, 0 where there is none, so that it can be fed again
    records: torch.Tensor  # [K, B, NUM_FIELDS] int32, where both device and host reach them; of rows that draw nothing
    # in a step they stay unwritten
    supports: torch.Tensor  # [K, B, 2, S] int32: ids, best first, and the bits of their float32 probabilities
