"""Sampling state of one session: its ``Open``, and all that is derived from it, each part once.

A service keeps one with each session, so that nothing is worked out anew in a step and nothing outlives the session.
"""

from __future__ import annotations

import torch

from outrider.ports import Open
from outrider.sampling.logits_processors.token_rules import TokenRules
from outrider.sampling.metadata import SamplingMetadata


class SessionSampling:
    """Sampling parameters of one session and what is derived from them; for one thread."""

    __slots__ = ("_metadata", "_rules", "_rules_key", "open")

    def __init__(self, open_: Open) -> None:
        self.open = open_
        self._metadata: SamplingMetadata | None = None
        self._rules: TokenRules | None = None
        self._rules_key: tuple[int, torch.device] | None = None

    @property
    def metadata(self) -> SamplingMetadata:
        """What the scoring kernels are told of the session."""
        if self._metadata is None:
            self._metadata = SamplingMetadata.of(self.open)
        return self._metadata

    def token_rules(self, vocab_size: int, device: torch.device) -> TokenRules:
        """Banned, moved and ending tokens; kept for the vocabulary and the device of the last call."""
        if self._rules is None or self._rules_key != (vocab_size, device):
            self._rules, self._rules_key = TokenRules.of(self.open, vocab_size, device), (vocab_size, device)
        return self._rules
