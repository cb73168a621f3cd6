"""EAGLE, MTP and DFlash through the kernels of a GPU, interpreted on a CPU: their drafts are those of the papers.

Run as a module with ``TRITON_INTERPRET=1`` and a folder to write to, by ``test_heads_on_kernels.py``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from tests.draft_service.head_rig import Checked, Reference, options, served
from tests.support.dflash import DFlashReference, build_dflash
from tests.support.pair_heads import EagleReference, MtpReference, build_eagle, build_mimo
from tests.support.quick_interpreter import set_up_quick_interpreter
from tests.support.tiny_models import cached_tiny_model


def check(method: str, head: Path, target: Path, reference: Reference) -> None:
    rig = Checked(served(method, head, target), reference, target)
    rig.generate([options(2, 9, max_tokens=4), options(1, 3, max_tokens=4)])


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    set_up_quick_interpreter()
    target = cached_tiny_model("llama", seed=1)
    eagle, dflash = build_eagle(folder / "eagle", bias=True), build_dflash(folder / "dflash")
    mimo = build_mimo(folder / "mimo")
    check("eagle", eagle, target, EagleReference(eagle, target))
    check("dflash", dflash, target, DFlashReference(dflash, target))
    check("mtp", mimo, mimo, MtpReference(mimo, cached_tiny_model("qwen2", seed=1)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
