"""Statistics of speculation and latency, readings for metrics, and the request log."""
