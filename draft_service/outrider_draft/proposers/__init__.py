"""Ways to make proposals: with a small model, or by looking up what followed the same words before."""
