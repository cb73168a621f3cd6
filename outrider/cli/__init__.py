"""The command line: ``outrider serve | generate | demo | info | config``.

Owns what people type and read, and the child processes of ``serve`` and ``demo``. Reaches a server through
``outrider.client`` like any other user. Knows no torch and no service: those are started as processes, by name.
"""
