"""Makes the training tool importable and keeps torch to one thread."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
