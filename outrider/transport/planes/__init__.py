"""Tensor planes beside the message itself: how the bytes of a large array cross a link on one host.

A service offers, the coordinator proves that it sees the same memory, and only then is it used; any failure on the
way leaves the tensors inline. Knows arrays and bytes, no tokens and no streams.
"""

CAPABILITY = ("outrider-tensor-plane", "shared_memory")
"""Metadata of the call that opens a link: the caller would read an offered file, if it sees it."""
