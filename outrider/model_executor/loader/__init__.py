"""Model loading: folders, weights, tokenizer files and the facts that a service describes itself with."""
