"""The embedded pair and what ``outrider demo`` does with it.

Owns where the pair's folders are, the prompts, and the measurement of a server with speculation against itself without.
Knows no process and no terminal: ``outrider.cli.demo`` starts the services and shows the figures.
"""

from __future__ import annotations

from pathlib import Path

PAIR = Path(__file__).parent / "pair"
TARGET = PAIR / "target"
DRAFT = PAIR / "draft"
