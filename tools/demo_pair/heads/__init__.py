"""Heads for the embedded target: EAGLE-3 and DFlash, their training, and the registry of both."""
