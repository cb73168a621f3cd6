"""Steady steps: what running sessions ask for together, served as columns.

``waiting`` holds sessions that were answered, as arrays against which the next columns are checked; ``step`` is one
item of each of many sessions; ``steps`` takes a step from arrival to answer, or hands it to the way of single items.
``plain_step`` is one token of each of many sessions that is computed before it is asked for; ``plain_steps`` is the
chain of those.
"""
