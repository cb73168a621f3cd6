"""Counter-based random numbers: one contract (``streams``), and implementations for each place that draws.

``scalar`` is plain Python, ``philox_numpy`` numpy, ``philox_torch`` tensors on any device, ``philox_triton`` device
functions for kernels. All give the same bits. Importing this package imports none of them.
"""
