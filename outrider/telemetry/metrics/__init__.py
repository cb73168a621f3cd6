"""Metrics for Prometheus: what there is (``catalogue``), in its text form over HTTP (``endpoint``).

Figures are kept as plain numbers where things happen (``outrider.readings``) and turned into metrics when somebody
asks. ``prometheus_client`` is imported by ``endpoint`` alone, and only where a port is set.
"""
