"""Batch invariance under load: streams of a pair with flat logits, compared with their texts computed alone."""
