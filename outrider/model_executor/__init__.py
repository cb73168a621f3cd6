"""Runs one model on its device: pages, sequences, one ragged forward, sampling and scoring.

Owns weights, KV memory and every tensor. Knows no network, no session and no request: a service tells it which tokens
to append to which sequence and of which positions it wants logits.
"""
