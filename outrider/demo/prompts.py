"""Prompts of the demonstration: beginnings of Python, on which the pair was trained."""

PROMPTS = (
    'def read_lines(path, encoding="utf-8"):\n',
    "class Stack:\n    def __init__(self):\n",
    "import os\nimport sys\n\ndef main(argv=None):\n",
    "def parse_header(line):\n    name, _, value =",
    "class TestQueue(unittest.TestCase):\n    def setUp(self):\n",
)
