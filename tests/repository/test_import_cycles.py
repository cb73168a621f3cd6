"""No module of ours imports itself by way of others: each can be the first that a fresh interpreter imports.

Read from the sources, since importing each of them first takes a minute. A cycle is one of imports that run with the
module; those inside functions, and those for types alone, do not. An import of ``a.b`` runs ``a`` too.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = (
    "outrider",
    "coordinator/outrider_coordinator",
    "draft_service/outrider_draft",
    "target_service/outrider_target",
)


def modules(folders: list[Path]) -> dict[str, Path]:
    """Name of each module: its file."""
    found = {}
    for folder in folders:
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder.parent).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path) -> Iterator[str]:
    """The names that a module imports while it runs: modules, or names in one."""
    pending: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            pending += node.orelse
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        pending += ast.iter_child_nodes(node)


def graph(folders: list[Path]) -> dict[str, set[str]]:
    """Module: those that run before it, without the packages that it is in, which always have begun by then."""
    known = modules(folders)
    return {
        name: {before for target in imported(path) for before in chain(target) if before in known} - set(chain(name))
        for name, path in known.items()
    }


def chain(name: str) -> Iterator[str]:
    """``a``, ``a.b`` and ``a.b.c`` of ``a.b.c``."""
    parts = name.split(".")
    return (".".join(parts[: end + 1]) for end in range(len(parts)))


def test_no_import_leads_back_to_its_module() -> None:
    found = graph([ROOT / source for source in SOURCES])
    assert "outrider.cli.compatibility.table" in found["outrider.cli.serve_settings"]
    assert "outrider.cli.compatibility" in found["outrider.cli.serve_settings"]
    TopologicalSorter(found).prepare()


@pytest.mark.parametrize("entry", ["from pack.inner import other", "import pack.inner.other"])
def test_a_cycle_through_a_package_is_found_and_fails(tmp_path: Path, entry: str) -> None:
    files = {
        "pack/__init__.py": "",
        "pack/first.py": "from pack.inner.other import VALUE\nNAME = VALUE",
        "pack/inner/__init__.py": "from pack.inner.command import run",
        "pack/inner/command.py": "from pack.first import NAME\nrun = NAME",
        "pack/inner/other.py": "VALUE = 1",
        "entry.py": entry,
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    with pytest.raises(CycleError) as caught:
        TopologicalSorter(graph([tmp_path / "pack"])).prepare()
    assert {"pack.first", "pack.inner", "pack.inner.command"} <= set(caught.value.args[1])
    outcome = subprocess.run(
        [sys.executable, "-c", "import pack.first"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "partially initialized module 'pack.first'" in outcome.stderr
