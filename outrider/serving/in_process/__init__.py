"""In-process services: the engine thread that owns a device, its links, and the service that opens them."""
