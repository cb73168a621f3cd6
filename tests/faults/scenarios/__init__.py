"""Scenarios: each a layout, a count and what is done; one row of the table that ``make soak`` prints."""
