"""What holds for every test."""

from __future__ import annotations

import os

# See outrider.model_executor.device_setup: it is read once, at a process's first product, whichever test that is in.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
