"""Outrider: speculative decoding as real microservices."""

__version__ = "0.1.0"
