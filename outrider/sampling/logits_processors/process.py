"""Logits processing: applies the sampling parameters of each row to its logits.

The order is vLLM's (``v1/sample/sampler.py``): allowed ids, bad words, minimum length, grammar, bias, penalties, then
temperature, min-p, top-k, top-p. Masked is -inf. Temperature 0 ends after the penalties.

As in vLLM a bad word counts only where all of it stands in the output: a prompt that ends in its beginning does not ban
its end. Draft tokens before a position are output to it.

Shape letters: ``N`` rows, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from outrider.sampling.logits_processors.grammar_masks import mask_grammars
from outrider.sampling.logits_processors.penalties import apply_penalties
from outrider.sampling.logits_processors.token_rules import TokenRules
from outrider.sampling.logits_processors.truncation import truncate
from outrider.sampling.logits_processors.workspace import Workspace
from outrider.sampling.parameters import SMALLEST_TEMPERATURE, has_token_rules, is_greedy
from outrider.sampling.rows import LogitRow, SessionSpan, spans_of

_MASKED = float("-inf")


def process_logits(logits: Tensor, rows: Sequence[LogitRow]) -> Tensor:  # [N, V] float32 -> [N, V] float32
    """Logits after all sampling parameters; the given tensor itself if no row has any.

    All tokens of a row may be masked: callers check this before drawing (``checks``).
    """
    spans = spans_of(rows)
    workspace = Workspace(logits)
    _adjust(workspace, spans)
    _divide_by_temperature(workspace, spans)
    truncate(workspace, spans)
    return workspace.logits


def adjust_logits(logits: Tensor, rows: Sequence[LogitRow]) -> Tensor:  # [N, V] float32 -> [N, V] float32
    """Logits after the processors that precede the temperature. Changes ``logits``, and may return it."""
    workspace = Workspace(logits, is_owned=True)
    _adjust(workspace, spans_of(rows))
    return workspace.logits


def _adjust(workspace: Workspace, spans: Sequence[SessionSpan]) -> None:
    _limit_ids(workspace, spans)
    ruled = [span for span in spans if has_token_rules(span.open)]
    rules = [span.session.token_rules(workspace.vocab_size, workspace.logits.device) for span in ruled]
    _ban(workspace, ruled, rules)
    _add_bias(workspace, ruled, rules)
    apply_penalties(workspace, spans)


def _limit_ids(workspace: Workspace, spans: Sequence[SessionSpan]) -> None:
    """Mask the padding ids of the vocabulary; a limit of 0 means there are none."""
    limits = {span.open.num_token_ids or workspace.vocab_size for span in spans}
    if len(limits) == 1 and (limit := limits.pop()) < workspace.vocab_size:
        workspace.writable()[:, limit:] = _MASKED
    for span in spans if limits else ():
        if 0 < span.open.num_token_ids < workspace.vocab_size:
            workspace.writable()[span.start : span.stop, span.open.num_token_ids :] = _MASKED


def _ban(workspace: Workspace, spans: Sequence[SessionSpan], rules: Sequence[TokenRules]) -> None:
    """Mask ids that are not allowed or banned, ends before the minimum length, completions of bad words, and what a
    grammar refuses.
    """
    for span, of_session in zip(spans, rules, strict=True):
        if of_session.banned is not None:
            workspace.writable()[span.start : span.stop].masked_fill_(of_session.banned, _MASKED)
        if of_session.ending_ids is not None and (below := _below_minimum(span)):
            workspace.writable()[workspace.tensor(below).unsqueeze(1), of_session.ending_ids] = _MASKED
    _ban_completions(workspace, spans, rules)
    mask_grammars(workspace, spans)


def _below_minimum(span: SessionSpan) -> list[int]:
    """Indices of the rows before the minimum length."""
    least = span.open.sampling.min_tokens
    return [index for index, row in zip(span.indices, span.rows, strict=True) if row.num_output_tokens < least]


def _ban_completions(workspace: Workspace, spans: Sequence[SessionSpan], rules: Sequence[TokenRules]) -> None:
    pairs = [
        (index, token_id)
        for span, of_session in zip(spans, rules, strict=True)
        if of_session.bad_words
        for index, row in zip(span.indices, span.rows, strict=True)
        for token_id in of_session.bad_words.completed(row.tokens, min(row.open.prompt_length, row.length), row.length)
    ]
    if pairs:
        indices, token_ids = workspace.tensor([i for i, _ in pairs]), workspace.tensor([t for _, t in pairs])
        workspace.writable()[indices, token_ids] = _MASKED


def _add_bias(workspace: Workspace, spans: Sequence[SessionSpan], rules: Sequence[TokenRules]) -> None:
    for span, of_session in zip(spans, rules, strict=True):
        if of_session.bias is not None:
            token_ids, biases = of_session.bias
            rows = workspace.writable()[span.start : span.stop]
            rows.index_add_(1, token_ids, biases.expand(len(span.rows), -1))


def _divide_by_temperature(workspace: Workspace, spans: Sequence[SessionSpan]) -> None:
    temperatures = [
        1.0 if is_greedy(span.open) else span.open.sampling.temperature for span in spans for _ in span.rows
    ]
    if any(temperature != 1.0 for temperature in temperatures):
        column = workspace.column([max(temperature, SMALLEST_TEMPERATURE) for temperature in temperatures])
        workspace.writable().div_(column)
