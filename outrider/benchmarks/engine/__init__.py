"""One model on its device: forwards and draft loops beside the floor that memory and arithmetic set.

Knows the engine and no service. A correctness gate runs first: many tokens in one forward must say what one at a time
do.
"""
