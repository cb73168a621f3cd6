"""Models whose next token is a function of the last one, at the cost of real ones: for measuring without downloads.

A synthetic pair costs what a real one costs (every matrix is dense, read and multiplied) while how often the draft
agrees with its target is chosen, not found. ``recipe`` says what a folder holds, ``cycle`` which token follows which,
``weights`` makes the tensors that say so. ``tools/make_pair.py`` writes the folders.
"""
