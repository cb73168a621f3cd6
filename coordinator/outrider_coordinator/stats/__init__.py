"""Statistics of speculation, and times of requests."""
