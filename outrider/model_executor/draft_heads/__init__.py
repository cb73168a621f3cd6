"""Draft heads: small models that read the hidden states of a target, with a KV cache of their own."""
