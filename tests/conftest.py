"""Settings, tiers and the budget of all tests."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest

# See outrider.model_executor.device_setup: it is read once, at a process's first product, whichever test that is in.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# Tests and the services that they start compute on one thread each: models are tiny, and the machine is shared.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Services are started with -P, so a child that runs a module of the tests does not find them by its folder.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))))

TESTS = Path(__file__).parent
# Folders of the second tier: their tests start processes, render charts or train. `make test` leaves them out.
INTEGRATION_FOLDERS = ("faults", "k8s", "end_to_end", "demo")
"""Order in which they run: long files first, so that no worker ends with one."""
# Greedy outputs equal the target's with every service running: what the first tier keeps of those folders.
SMOKE_TEST = TESTS / "end_to_end" / "test_greedy.py"
TEST_BUDGET_S = 5.0
"""Longest time of a test on an idle machine; the end of a run names tests that took longer."""
_NUM_NAMED = 10


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the second tier get their marker by folder, so that no new file is forgotten, and come last."""
    tier = dict.fromkeys(items, 0)
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        if folder in INTEGRATION_FOLDERS and item.path != SMOKE_TEST:
            item.add_marker(pytest.mark.integration)
            tier[item] = 1 + INTEGRATION_FOLDERS.index(folder)
    items.sort(key=tier.__getitem__)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of the other tier, where ``-m`` names one: three workers would import them for nothing."""
    selected: str = config.option.markexpr
    if "integration" not in selected or collection_path.suffix != ".py" or TESTS not in collection_path.parents:
        return None
    is_in_second = collection_path.relative_to(TESTS).parts[0] in INTEGRATION_FOLDERS and collection_path != SMOKE_TEST
    if "not integration" in selected:
        return is_in_second or None
    return (not is_in_second and "pytest.mark.integration" not in collection_path.read_text(encoding="utf-8")) or None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules are imported without garbage collection, and collections in tests do not scan what they left.

    Their garbage stays: to find that twentieth of 3.3 million objects takes a second of a processor in each process.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Start of torch's own generator: draws do not depend on the tests before them in the same process."""
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(0)


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The captured log without what asyncio says of earlier tests' tasks and of their closed event loops."""
    gc.collect()
    caplog.clear()
    caplog.handler.addFilter(_is_of_this_test)
    return caplog


def _is_of_this_test(record: logging.LogRecord) -> bool:
    """Verdict on a record: gRPC has one poller a process, which meets late events of loops that tests have closed."""
    return not (record.name == "asyncio" and "PollerCompletionQueue" in record.getMessage())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The budget of slow tests: how many took longer, the slowest by name, and the time of all tests."""
    seconds: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid] += report.duration
    slow = sorted(((took, test) for test, took in seconds.items() if took > TEST_BUDGET_S), reverse=True)
    total = sum(seconds.values())
    terminalreporter.write_line(
        f"budget: {len(slow)} of {len(seconds)} tests took more than {TEST_BUDGET_S:.0f} s,"
        f" {sum(took for took, _ in slow):.0f} s of {total:.0f} s in all"
    )
    for took, test in slow[:_NUM_NAMED]:
        terminalreporter.write_line(f"  {took:5.1f} s  {test}")
