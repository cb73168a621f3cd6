"""Writes the golden renders of the chart's examples anew: ``python -m tests.k8s.update_golden``."""

from __future__ import annotations

from tests.k8s.cases import EXAMPLES, golden_file
from tests.k8s.helm import Helm

COMMAND = "python -m tests.k8s.update_golden"


def main() -> None:
    """Write all of them."""
    helm = Helm()
    for name in EXAMPLES:
        golden_file(name).write_text(render(helm, name), encoding="utf-8")
    helm.close()


def render(helm: Helm, name: str) -> str:
    """An example's manifest and notes, as its file holds them."""
    manifest, notes = helm.render_text(EXAMPLES[name])
    tidy = "\n".join(line.rstrip() for line in f"{manifest}\n---\n# NOTES\n{_commented(notes)}".splitlines())
    return tidy + "\n"


def _commented(text: str) -> str:
    return "\n".join(f"# {line}" for line in text.strip().splitlines())


if __name__ == "__main__":
    main()
