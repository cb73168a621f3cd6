"""In-process services: the thread that owns a device, links to it, and the service that opens them."""
