"""Check that no docstring begins with a question word, preposition, pronoun or conjunction: a noun or verb comes first.

Docstrings of attributes are included: a string after an assignment.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
REFUSED = frozenset(
    {"Of", "What", "Whatever", "Whether", "Who", "Whoever", "Whose", "How", "Where", "When", "Which", "Whichever"}
    | {"That", "Why", "So", "Nobody", "There", "They", "These", "This", "Something", "Everything", "Somebody"}
    | {"And", "But", "Or", "Such", "Since", "Now", "If", "While", "Just", "Told", "Asked", "Held", "Likewise"}
    | {"For", "In", "By", "With", "From", "At", "On", "To", "As", "After", "Before", "Over", "Under", "Between", "Per"}
    | {"Without", "Within", "Through", "Into", "Until", "Beside", "Besides", "During", "Among", "Against", "Like"}
    | {"Because", "About", "Above", "Below", "Behind", "Beyond", "Via", "Unless", "Although", "Though", "Instead"}
    | {"It", "Its", "Their", "Them", "Those", "Others", "Once", "Also", "Too", "Nor", "Then", "Here", "Not", "Again"}
)
GENERATED = "outrider/v1/"


def main() -> int:
    """Exit status: 1 if a docstring of the checkout begins with such a word."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = [name for name in listed.splitlines() if not name.startswith(GENERATED) and (ROOT / name).exists()]
    problems = [f"{name}:{problem}" for name in names for problem in problems_of((ROOT / name).read_text("utf-8"))]
    print("\n".join(problems), file=sys.stderr, end="\n" * bool(problems))
    return bool(problems)


def problems_of(source: str) -> Iterator[str]:
    """Line and message of each such docstring in a module."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))) if (word := _first_word(text)) in REFUSED:
                yield f"{node.lineno}: a docstring begins with the noun that a reader searches for, not with {word!r}"


def _first_word(text: str) -> str:
    return text.split(maxsplit=1)[0].rstrip(".,:;") if text.strip() else ""


if __name__ == "__main__":
    sys.exit(main())
