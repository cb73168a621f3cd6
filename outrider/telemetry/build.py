"""Which source is running."""

from __future__ import annotations

import os
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def commit() -> str:
    """``GIT_COMMIT`` of the environment, else the checkout's commit; empty when neither is there."""
    return os.environ.get("GIT_COMMIT", "") or _of_checkout(_ROOT / ".git")


def _of_checkout(git: Path) -> str:
    try:
        if git.is_file():  # a linked worktree
            git = Path(git.read_text(encoding="ascii").removeprefix("gitdir:").strip())
        head = (git / "HEAD").read_text(encoding="ascii").strip()
        if not head.startswith("ref:"):
            return head
        shared = git / "commondir"
        common = git / shared.read_text(encoding="ascii").strip() if shared.is_file() else git
        return (common / head.removeprefix("ref:").strip()).read_text(encoding="ascii").strip()
    except OSError:
        return ""
