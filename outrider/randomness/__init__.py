"""Counter-based random streams: one contract (``streams``), and forms of it for the places that draw.

``scalar`` is plain Python, ``philox_numpy`` is numpy, ``philox_torch`` is tensors on any device, ``philox_triton`` is
device functions for kernels. All four give the same bits. Importing this package imports none of them.
"""
