"""Settings of tests over random values: the same values in every run, however slow the machine is."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

SAME_EACH_TIME = settings(deadline=None, derandomize=True, database=None, suppress_health_check=(HealthCheck.too_slow,))
