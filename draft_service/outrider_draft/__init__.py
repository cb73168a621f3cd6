"""The draft service: a small model, or none, that proposes tokens for a coordinator's sessions.

Owns the proposers and the ``ports.Draft`` around them. Knows nothing of the target, of judging, or of who asks.
"""
