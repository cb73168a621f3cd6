"""Decode batches: items of running sessions that arrive together, served as arrays.

``sessions`` keeps what does not change from step to step, ``waiting`` sessions that were answered, against which the
next columns are checked; ``step`` is one item of each of many sessions; ``expected`` plans one whose draft tokens are
still to come; ``steps`` takes a step from arrival to answer, or hands it to the way of single items.
``lookahead_step`` is
one token of each of many sessions that is computed before it is asked for; ``lookahead_steps`` is the chain of those.
"""
