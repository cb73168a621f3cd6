"""The parts of `tools/make_pair.py`: shapes and folders. What makes the weights is
`outrider.model_executor.synthetic`'s.

A synthetic pair costs what a real one costs (every matrix is dense, read and multiplied) while its next token is a
function of the last one alone, so that how often the draft agrees with its target is chosen, not found.
"""
