"""Tools are scripts beside their packages: tests import them as a script does, from the folder `tools`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
