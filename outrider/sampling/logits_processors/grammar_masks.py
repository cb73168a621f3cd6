"""Grammar masks: tokens that the grammar of a session does not allow at a position.

Draft tokens before a position are output to it. After a token that the grammar refuses, or an end of sequence, nothing
is masked: the refused token has probability 0, so that no rule goes on past it.

Shape letters: ``N`` rows, ``V`` vocabulary, ``W`` words of 32 tokens each.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.errors import InvalidRequestError
from outrider.kernels.device_stream import to_device
from outrider.sampling.logits_processors.workspace import Workspace
from outrider.sampling.rows import LogitRow, RowSpan
from outrider.structured_output import Matcher, Outcome

_MASKED = float("-inf")
_WORD_BITS = 32


def mask_grammars(workspace: Workspace, spans: Sequence[RowSpan]) -> None:
    """Mask what the grammars of the sessions refuse. A grammar that cannot be followed leaves no token."""
    matched = [(span, span.session.matcher) for span in spans if span.open.sampling.grammar is not None]
    for span, matcher in matched:
        if matcher is not None:
            words = [_words(matcher, row, workspace.vocab_size) for row in span.rows]
            refused = _refused(np.stack(words), workspace)
            workspace.writable()[span.start : span.stop].masked_fill_(refused, _MASKED)


def _words(matcher: Matcher, row: LogitRow, vocab_size: int) -> NDArray[np.int32]:  # [W]
    """Allowed tokens of one row."""
    num_words = -(-vocab_size // _WORD_BITS)
    start = min(row.open.prompt_length, row.length)
    if matcher.follow(row.tokens[start : row.length]) is not Outcome.OPEN:
        return np.full(num_words, -1, dtype=np.int32)
    found = np.zeros(num_words, dtype=np.int32)
    try:
        words = matcher.mask()[:num_words]
    except InvalidRequestError:
        return found
    found[: len(words)] = words
    return found


def _refused(words: NDArray[np.int32], workspace: Workspace) -> Tensor:  # [N, W] -> [N, V] bool
    """Expanded on the device: a sixteenth of the bytes travel."""
    device = workspace.logits.device
    packed = to_device(words.reshape(-1), device).view(words.shape)
    bits = torch.arange(_WORD_BITS, dtype=torch.int32, device=device)
    allowed = (packed.unsqueeze(-1) >> bits) & 1  # [N, W, 32]
    return allowed.flatten(1)[:, : workspace.vocab_size] == 0
