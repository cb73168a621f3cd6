"""Draft heads that read the target's hidden states and keep a KV cache: one module for each method."""
