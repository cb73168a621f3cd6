"""Makes docs/modules.md, a line for each module, from their docstrings; with --check only says whether it is fresh."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "modules.md"
PACKAGES = ("outrider", "draft_service", "target_service", "coordinator")
GENERATED = ROOT / "outrider" / "v1"

HEAD = """\
# Modules

<!-- Made by scripts/generate_modules.py from the modules' docstrings. Change them there, then `make docs`. -->

One line each; `outrider/v1` is generated from `proto/` and left out.
"""


def main() -> int:
    """Write the page, or compare with it."""
    text = HEAD + "".join(package_text(ROOT / name) for name in PACKAGES)
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    sys.stderr.write(f"{PAGE} is stale: run `make docs`\n")
    return 1


def package_text(package: Path) -> str:
    """One top-level package's table."""
    rows = [f"| `{module_name(path)}` | {first_sentence(path)} |\n" for path in module_files(package)]
    return f"\n## `{package.name}`\n\n| module | what |\n|---|---|\n" + "".join(rows)


def module_files(package: Path) -> Iterator[Path]:
    """Every module, packages before what is in them."""
    files = [path for path in package.rglob("*.py") if GENERATED not in path.parents]
    return iter(sorted(files, key=lambda path: module_name(path).split(".")))


def module_name(path: Path) -> str:
    """The name by which it is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def first_sentence(path: Path) -> str:
    """The docstring's first line, or the paragraph's if the sentence goes on."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    sentence = paragraph.partition(". ")[0].rstrip(".:")
    return sentence.replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
