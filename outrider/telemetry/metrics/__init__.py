"""Metrics for Prometheus: the catalogue, and the endpoint that serves them over HTTP.

Values are kept as plain numbers (``outrider.readings``) and converted to metrics at a scrape. Only ``endpoint`` imports
``prometheus_client``, and only if a port is set.
"""
