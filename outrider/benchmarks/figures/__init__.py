"""Parts of ``outrider bench figures``: what is measured, on which services, and the table of it."""
