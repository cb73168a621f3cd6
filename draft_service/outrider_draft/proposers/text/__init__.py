"""Proposers that read the text alone: n-gram lookup and suffix decoding, and the executor that runs them."""
