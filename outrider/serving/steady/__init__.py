"""Steady steps: what running sessions ask for together, served as columns.

``waiting`` holds sessions that were answered, as arrays against which the next columns are checked; ``step`` is one
item of each of many sessions; ``steps`` takes a step from arrival to answer, or hands it to the way of single items.
"""
