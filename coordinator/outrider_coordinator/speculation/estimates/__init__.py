"""Estimates that draft lengths are chosen by: acceptance rates, and the durations of forwards and rounds."""
