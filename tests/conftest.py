"""What holds for every test."""

from __future__ import annotations

import os
from pathlib import Path

# See outrider.model_executor.device_setup: it is read once, at a process's first product, whichever test that is in.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# Services are started with -P, so a child that runs a module of the tests does not find them by its folder.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))))
