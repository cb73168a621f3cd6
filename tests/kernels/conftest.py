"""Collection of the kernels' cases.

Cases are modules named ``*_cases.py``. On a machine with a GPU, each case is a test of its own that is marked ``gpu``,
so that pytest-xdist compiles kernels in several processes. Elsewhere ``test_triton.py`` and ``test_scoring_triton.py``
run whole modules in Triton's interpreter; ``TRITON_INTERPRET=1`` collects each case here too, without a GPU.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.support.quick_interpreter import set_up_quick_interpreter

INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
CASES = "*_cases.py"

if INTERPRETS:
    set_up_quick_interpreter()


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Cases, except those that the command names: pytest collects them itself."""
    can_run = INTERPRETS or torch.cuda.is_available()
    if not (can_run and file_path.match(CASES)) or parent.session.isinitpath(file_path):
        return None
    module: pytest.Module = pytest.Module.from_parent(parent, path=file_path)
    return module


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Cases that Triton compiles need a GPU."""
    for item in items:
        if not INTERPRETS and item.path.match(f"tests/kernels/{CASES}"):
            item.add_marker(pytest.mark.gpu)
