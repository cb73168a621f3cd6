"""``outrider trace``: one request as a waterfall, on the terminal and as a page for a browser."""
