"""Proposers: draft model, n-gram lookup, and custom classes."""
