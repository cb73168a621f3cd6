"""Processors that are kept from idling while there is work: a thread that sleeps on one runs at once when woken.

A processor that idles takes some 100 us to come back on many hosts, virtual machines above all, and a step wakes a
dozen threads one after the other (docs/decisions). So a process takes few processors for its own, stays on them, and
runs on each a program of the lowest priority that only burns time.
"""
