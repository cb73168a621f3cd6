"""Makes the embedded pair: corpus, tokenizer, model, training, measurements and the published folders.

Owns how the shipped weights came to be. Knows nothing of the services that run them.
"""
