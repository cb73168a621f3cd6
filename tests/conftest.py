"""What holds for every test."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from pathlib import Path

import pytest

# See outrider.model_executor.device_setup: it is read once, at a process's first product, whichever test that is in.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# Services are started with -P, so a child that runs a module of the tests does not find them by its folder.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))))

TESTS = Path(__file__).parent
# Folders of the second tier: their tests start processes, render charts or train. `make test-integration` runs them.
INTEGRATION_FOLDERS = frozenset({"demo", "end_to_end", "faults", "k8s"})
# Greedy outputs equal the target's with every service running: what the first tier keeps of those folders.
SMOKE_TEST = TESTS / "end_to_end" / "test_greedy.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the second tier get their marker by folder, so that no new file is forgotten."""
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        if folder in INTEGRATION_FOLDERS and item.path != SMOKE_TEST:
            item.add_marker(pytest.mark.integration)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules are imported without garbage collection, and collections in tests do not scan what they left."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
