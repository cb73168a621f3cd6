"""Draft service: proposes tokens with a small model, or without one, for the sessions of coordinators.

Owns the proposers and the ``ports.Draft`` around them. Independent of the target and of acceptance.
"""
