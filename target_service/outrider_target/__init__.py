"""The target service: the large model, which says what it thinks of committed and drafted tokens.

Owns scoring and the ``ports.Target`` around it. Knows nothing of drafts beyond the tokens to be scored, and judges
nothing.
"""
