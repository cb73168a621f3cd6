"""Properties of the repository that `make check` does not see: links, packaging, requirements."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

import outrider

ROOT = Path(__file__).parents[2]


def test_the_configuration_check_can_fail(tmp_path: Path) -> None:
    copy = tmp_path / "scripts" / "generate_configuration.py"
    copy.parent.mkdir()
    copy.write_text((ROOT / "scripts" / copy.name).read_text())
    page = tmp_path / "docs" / "configuration.md"
    page.parent.mkdir()
    page.write_text((ROOT / "docs" / page.name).read_text().replace("50050", "50055"))
    outcome = subprocess.run([sys.executable, copy, "--check"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert outcome.returncode == 1
    assert "stale" in outcome.stderr


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
)
def test_links_in_pages_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for link in re.findall(r"\]\(([^)#]+)", path.read_text()):
        if not link.startswith("http"):
            assert (path.parent / link).exists(), f"{page} links to {link}"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_base_install_has_no_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[<>=\[; ]", line)[0] for line in project["dependencies"]}
    heavy = {"torch", "transformers", "triton", "safetensors", "numpy", "tokenizers", "cryptography", "uvloop"}
    assert not names & heavy
    torch = next(line for line in project["optional-dependencies"]["engine"] if line.startswith("torch"))
    assert re.fullmatch(r"torch>=[\d.]+,<[\d.]+", torch)


def test_the_wheel_leaves_the_embedded_pair_out() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert not any("pair" in pattern for patterns in data.values() for pattern in patterns)


def test_every_requirement_is_locked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(item for extra in project["optional-dependencies"].values() for item in extra)]
    wanted = {_normal(re.split(r"[<>=\[; ]", line)[0]) for line in lines}
    locked = {_normal(line.partition("==")[0]) for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert not wanted - locked - {"outrider"}  # extras of ours that others of ours bring


def test_no_host_and_no_local_path_is_locked() -> None:
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert re.fullmatch(r"#.*|[A-Za-z0-9_.-]+==[A-Za-z0-9_.]+", line), line


def test_the_version_is_one() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", outrider.__version__)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_docstring_check_finds_attributes_and_functions() -> None:
    problems_of = runpy.run_path(str(ROOT / "scripts" / "check_docstrings.py"))["problems_of"]
    source = 'SIZE = 4\n"""Of a row."""\n\n\ndef f():\n    """Whether it is."""\nA = 1\n"""Offset of it."""\n'
    assert [problem.partition(":")[0] for problem in problems_of(source)] == ["2", "6"]


LIST = Path(__file__).with_name("private_attributes.txt")
"""Allowed uses, one a line: file, attribute, count."""
_ALLOWED = {"_replace", "_asdict", "_fields", "_create_unverified_context", "_exit", "_dynamo", "_subclasses"}
"""Documented names of the standard library, and modules of PyTorch."""
_EXEMPT = {"tests/support/quick_interpreter.py", "tests/repository/test_house.py"}
"""Patches of Triton's interpreter, and the examples below."""
_ACCESS = re.compile(r"(?<=[\w)\]])(?<!\bself)(?<!\bcls)(?<!\bsuper\(\))\.(_[a-zA-Z]\w*)")
"""Attribute of an object that is neither the class's own nor its base's."""
_PATCH = re.compile(r"(?:set|get|del)attr\(\s*[\w.]+,\s*\"(_[a-zA-Z]\w*)\"")


def private_uses(source: str) -> list[str]:
    """Private attributes that the code reads, sets or patches, but for those of its own classes and their bases."""
    return [name for name in _ACCESS.findall(source) + _PATCH.findall(source) if name not in _ALLOWED]


def test_tests_use_no_private_attributes_but_those_listed() -> None:
    used: Counter[tuple[str, str]] = Counter()
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if (name := path.relative_to(ROOT).as_posix()) not in _EXEMPT:
            used.update((name, attribute) for attribute in private_uses(path.read_text()))
    lines = LIST.read_text().splitlines()
    allowed = Counter({(name, attribute): int(count) for name, attribute, count in map(str.split, lines)})
    assert not used - allowed, "tests use the public interface of a class"
    assert not allowed - used, f"remove these from {LIST.name}"


def test_private_uses_are_found() -> None:
    assert private_uses("self._a + super()._b() + x.y._c + f()._d + z._replace(a=1) + x.__dict__") == ["_c", "_d"]
    assert private_uses('monkeypatch.setattr(module, "_d", 1)\nsetattr(x, "e", "_f")\nx._g = 2\n') == ["_g", "_d"]
