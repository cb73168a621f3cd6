"""Device operations: each folder has a contract and dispatch (``__init__``), a PyTorch reference (``reference``) and
kernels.

The kernel is chosen by device; reference and kernels have the same contract.
"""
