"""Uses of private attributes by tests: those that remain are listed, and no other may be added."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("private_attributes.txt")
"""Allowed uses, one a line: file, attribute, count."""
_ALLOWED = {"_replace", "_asdict", "_fields", "_create_unverified_context", "_exit", "_dynamo", "_subclasses"}
"""Documented names of the standard library, and modules of PyTorch."""
_EXEMPT = {"tests/support/quick_interpreter.py", "tests/repository/test_private_attributes.py"}
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
