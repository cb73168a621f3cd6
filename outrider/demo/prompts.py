"""What the pair is asked to go on from: beginnings of Python, which is what it was trained on."""

PROMPTS = (
    'def read_lines(path, encoding="utf-8"):\n',
    "class Stack:\n    def __init__(self):\n",
    "import os\nimport sys\n\ndef main(argv=None):\n",
    "def parse_header(line):\n    name, _, value =",
    "class TestQueue(unittest.TestCase):\n    def setUp(self):\n",
)
