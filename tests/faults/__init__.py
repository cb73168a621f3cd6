"""Faults done to real processes, drawn from a printed seed: every stream is compared with its undisturbed twin."""
