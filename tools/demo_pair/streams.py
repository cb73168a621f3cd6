"""Training rows, cut at random from packed token streams.

Owns where a row may begin.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor

from demo_pair.corpus import BOS_ID

SHARE_OF_ROWS_AT_A_STATEMENT = 0.5


def statement_starts(tokenizer: Tokenizer, ids: npt.NDArray[np.uint16]) -> npt.NDArray[np.int64]:
    """Positions whose token begins a line with a letter: top-level statements, near enough.  # [T] -> [N]"""
    pieces = [tokenizer.decode([index], skip_special_tokens=False) for index in range(tokenizer.get_vocab_size())]
    ends_line = np.array([piece.endswith("\n") for piece in pieces])
    begins_word = np.array([piece[:1].isalpha() or piece[:1] in "_@" for piece in pieces])
    return np.flatnonzero(ends_line[ids[:-1]] & begins_word[ids[1:]]).astype(np.int64) + 1


@dataclass(slots=True)
class TokenStream:
    """Packed tokens on the training device, with the places where a row may pretend that a file begins."""

    ids: Tensor  # [T] int32
    starts: Tensor  # [N] int64, may be empty

    @classmethod
    def of(cls, ids: npt.NDArray[np.uint16], device: torch.device, tokenizer: Tokenizer | None = None) -> "TokenStream":
        """Put ids on the device; with a tokenizer, rows may also begin at statements."""
        starts = statement_starts(tokenizer, ids) if tokenizer is not None else np.empty(0, np.int64)
        return cls(torch.from_numpy(ids.astype(np.int32)).to(device), torch.from_numpy(starts).to(device))

    def rows(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        """Random rows; about half begin with bos followed by a top-level statement.  # [count, length] int64"""
        device = self.ids.device
        last = self.ids.numel() - length
        anywhere = torch.randint(0, last, (count,), generator=generator, device=device)
        if self.starts.numel() == 0:
            return self._cut(anywhere, length)
        pick = torch.randint(0, self.starts.numel(), (count,), generator=generator, device=device)
        at_statement = torch.rand(count, generator=generator, device=device) < SHARE_OF_ROWS_AT_A_STATEMENT
        begin = torch.where(at_statement, (self.starts[pick] - 1).clamp(max=last - 1), anywhere)
        rows = self._cut(begin, length)
        # The token before a statement is a line end: bos takes its place, as it does before a prompt.
        rows[:, 0] = torch.where(at_statement, BOS_ID, rows[:, 0])
        return rows

    def _cut(self, begin: Tensor, length: int) -> Tensor:
        return self.ids[begin[:, None] + torch.arange(length, device=begin.device)].long()


@dataclass(slots=True)
class Mixture:
    """Several streams, each with its share of the rows."""

    parts: list[tuple[TokenStream, float]]
    generator: torch.Generator

    def rows(self, count: int, length: int) -> Tensor:
        """Rows of all parts, in proportion.  # [count, length] int64"""
        total = sum(share for _, share in self.parts)
        counts = [round(count * share / total) for _, share in self.parts]
        counts[0] += count - sum(counts)
        drawn = zip(self.parts, counts, strict=True)
        return torch.cat([stream.rows(n, length, self.generator) for (stream, _), n in drawn if n])
