"""Grammar masks: tokens that the grammar of a session does not allow at a position. ``PositionMasks`` says which.

Shape letters: ``N`` rows, ``V`` vocabulary, ``W`` words of 32 tokens each.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.kernels.device_stream import pinned_to_device, to_device
from outrider.kernels.token_mask import mask_tokens
from outrider.sampling.logits_processors.workspace import Workspace
from outrider.sampling.rows import ScoreRequest, SessionSpan
from outrider.structured_output import PositionMasks, joined_words

_MASKED = float("-inf")
_WORD_BITS = 32


def mask_grammars(workspace: Workspace, spans: Sequence[SessionSpan]) -> None:
    """Mask what the grammars of the sessions refuse: one copy to the device for all of them."""
    matched = [span for span in spans if span.open.sampling.grammar is not None]
    if not matched:
        return
    first, last = matched[0].start, matched[-1].stop
    words = np.full((last - first, -(-workspace.vocab_size // _WORD_BITS)), -1, dtype=np.int32)
    for span in matched:
        masks = span.rows[0].masks or _masks_of(span)
        for index, row in zip(span.indices, span.rows, strict=True):
            if (allowed := masks.at(row.length)) is not None:
                allowed = allowed[: words.shape[1]]
                words[index - first, : len(allowed)] = allowed
                words[index - first, len(allowed) :] = 0
    workspace.writable()[first:last].masked_fill_(_refused(words, workspace), _MASKED)


def masked_rows(logits: Tensor, firsts: Sequence[int], masks: Sequence[PositionMasks]) -> Tensor:  # [R, V]
    """Logits in which what grammars refuse is ``REFUSED``: the given ones, changed, or float32 ones of a type that has
    no such number. ``firsts``: first row of each of the masks.
    """
    if logits.dtype == torch.float16:
        logits = logits.float()
    num_words = -(-logits.shape[-1] // _WORD_BITS)
    counts = np.array([each.num_positions for each in masks])
    rows = np.repeat(np.array(firsts) - (counts.cumsum() - counts), counts) + np.arange(counts.sum())
    words = joined_words(masks, num_words)  # [N, W]
    device = logits.device
    mask_tokens(logits, to_device(rows, device), pinned_to_device(words, device))
    return logits


def masks_of(request: ScoreRequest) -> PositionMasks:
    """Masks of positions for which none were begun."""
    start = min(request.open.prompt_length, request.base)
    output = request.tokens[start : request.base]
    return request.session.masks(output, request.draft_token_ids, position=request.base)


def _masks_of(span: SessionSpan) -> PositionMasks:
    """Masks of rows for which none were begun."""
    first, last = span.rows[0], span.rows[-1]
    start = min(first.open.prompt_length, first.length)
    output, drafts = first.tokens[start : first.length], last.tokens[first.length : last.length]
    return span.session.masks(output, drafts, position=first.length)


def _refused(words: NDArray[np.int32], workspace: Workspace) -> Tensor:  # [N, W] -> [N, V] bool
    """Expanded on the device: a sixteenth of the bytes travel."""
    device = workspace.logits.device
    packed = to_device(words.reshape(-1), device).view(words.shape)
    bits = torch.ones((), dtype=torch.int32, device=device) << torch.arange(
        _WORD_BITS, dtype=torch.int32, device=device
    )
    allowed = packed.unsqueeze(-1) & bits  # [N, W, 32]
    return (allowed == 0).flatten(1)[:, : workspace.vocab_size]
