"""Logits processors: sampling parameters applied to rows of logits, in vLLM's order."""
