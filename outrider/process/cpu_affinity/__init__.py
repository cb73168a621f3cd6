"""Processor affinity: processors that do not idle while there is work, so that threads on them resume at once.

On many hosts, virtual machines above all, an idle processor takes about 100 us to resume, and a step wakes a dozen
threads one after the other (docs/decisions). A process therefore takes a few processors, stays on them, and runs a
spinner of the lowest priority on each.
"""
