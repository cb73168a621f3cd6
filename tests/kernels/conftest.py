"""Collection of the kernels' cases.

Cases are modules named ``*_cases.py``. On a machine with a GPU, each case is a test of its own that is marked ``gpu``,
so that pytest-xdist compiles kernels in several processes. Elsewhere ``test_triton.py`` and ``test_scoring_triton.py``
run whole modules in Triton's interpreter; ``TRITON_INTERPRET=1`` collects each case here too, without a GPU.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

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


@pytest.fixture
def any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of a launch in random order, as they end on a GPU."""
    if INTERPRETS:
        from triton.runtime import interpreter

        builder: Any = interpreter.interpreter_builder
        order, set_index = random.Random(0), builder.set_grid_idx
        places: list[tuple[int, ...]] = []

        def set_random_index(*_: int) -> None:
            if not places:
                places.extend(torch.cartesian_prod(*(torch.arange(size) for size in builder.grid_dim)).tolist())
                order.shuffle(places)
            set_index(*places.pop())

        monkeypatch.setattr(builder, "set_grid_idx", set_random_index)
