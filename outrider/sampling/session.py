"""Sampling state of one session: its ``Open``, and all that is derived from it, each part once.

A service keeps one with each session, so that nothing is worked out anew in a step and nothing outlives the session.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.ports import Open
from outrider.sampling.logits_processors.token_rules import TokenRules
from outrider.sampling.metadata import SamplingMetadata
from outrider.structured_output import GrammarCompiler, Matcher, PositionMasks


class SessionSampling:
    """Sampling parameters of one session and what is derived from them; for one thread."""

    __slots__ = ("_grammars", "_matcher", "_metadata", "_rules", "_rules_key", "has_grammar", "open")

    def __init__(self, open_: Open, grammars: GrammarCompiler | None = None) -> None:
        """``grammars`` compiles the session's grammar; None: it is not applied."""
        self.open = open_
        self.has_grammar = open_.sampling.grammar is not None
        self._grammars = grammars
        self._matcher: Matcher | None = None
        self._metadata: SamplingMetadata | None = None
        self._rules: TokenRules | None = None
        self._rules_key: tuple[int, torch.device] | None = None

    @property
    def metadata(self) -> SamplingMetadata:
        """Parameters of the session for the scoring kernels."""
        if self._metadata is None:
            self._metadata = SamplingMetadata.of(self.open)
        return self._metadata

    def masks(self, output: Sequence[int], draft_token_ids: Sequence[int], *, position: int) -> PositionMasks:
        """Masks at ``position``, after ``output``, and after each of the draft tokens; not made yet."""
        is_compiled = self._matcher is not None
        return PositionMasks(self._find_matcher, output, draft_token_ids, position=position, is_compiled=is_compiled)

    def _find_matcher(self) -> Matcher | None:
        """Matcher of the session's grammar; ``InvalidRequestError`` for one that cannot be compiled."""
        grammar = self.open.sampling.grammar
        if self._matcher is None and grammar is not None and self._grammars is not None:
            self._matcher = self._grammars.compile(grammar, self.open.eos_token_ids)
        return self._matcher

    def token_rules(self, vocab_size: int, device: torch.device) -> TokenRules:
        """Banned, moved and ending tokens; kept for the vocabulary and the device of the last call."""
        if self._rules is None or self._rules_key != (vocab_size, device):
            self._rules, self._rules_key = TokenRules.of(self.open, vocab_size, device), (vocab_size, device)
        return self._rules
