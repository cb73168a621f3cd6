"""Parts of ``measure_figures.py``: what is measured, on which services, and the table of it."""
