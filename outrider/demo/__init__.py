"""The embedded pair and what ``outrider demo`` does with it.

Owns where the pair's folders are, the prompts, and the measurement of a server with speculation against itself without.
Knows no process and no terminal: ``outrider.cli.demo`` starts the services and shows the figures.
"""

from __future__ import annotations

from pathlib import Path

from outrider.errors import ConfigError

PAIR = Path(__file__).parent / "pair"
TARGET = PAIR / "target"
DRAFT = PAIR / "draft"
EAGLE3 = PAIR / "eagle3"
"""An EAGLE-3 head for the target."""
DFLASH = PAIR / "dflash"
"""A DFlash block drafter for the target."""
PROMPTS = (
    'def read_lines(path, encoding="utf-8"):\n',
    "class Stack:\n    def __init__(self):\n",
    "import os\nimport sys\n\ndef main(argv=None):\n",
    "def parse_header(line):\n    name, _, value =",
    "class TestQueue(unittest.TestCase):\n    def setUp(self):\n",
)
"""Beginnings of Python, on which the pair was trained."""


def require_pair() -> None:
    """``ConfigError`` where the pair, which is a wheel of its own, is not installed."""
    if not (TARGET / "config.json").is_file():
        raise ConfigError(
            "", "the embedded pair is not installed: add the wheel outrider_demo_pair of this release, or use a clone"
        )
