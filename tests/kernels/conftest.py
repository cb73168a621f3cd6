"""Kernel tests compute on one thread: the models are tiny, and the machine is shared."""

from __future__ import annotations

import os

import torch

from tests.support.quick_interpreter import set_up_quick_interpreter

torch.set_num_threads(1)
if os.environ.get("TRITON_INTERPRET") == "1":
    set_up_quick_interpreter()
