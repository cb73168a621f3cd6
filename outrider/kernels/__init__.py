"""Device operations: each folder has a contract and dispatch (``__init__``) and the truth in PyTorch (``reference``).

A faster kernel stands beside its reference and is chosen by device; the contract is the same for both.
"""
