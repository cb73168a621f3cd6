"""Replicas and links: which service answers which session, and when commands are dispatched."""
