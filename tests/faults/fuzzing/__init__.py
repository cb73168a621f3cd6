"""Messages that no honest peer sends: valid ones changed at random, cut short, too long, or no messages at all.

``mutation`` changes messages by their descriptors, ``templates`` holds honest ones to begin with, ``oversized`` makes
public requests of up to 8 MB, ``campaign`` sends them all and notes the statuses. ``python -m tests.faults.fuzzing``
runs a campaign in a process of its own, so that its work delays no reader whose gaps are measured.
"""
