"""Quantization: the format in which a checkpoint keeps the weights of its linear layers.

All formats are FP8 (E4M3) or FP4 (E2M1) numbers with scales. Refuses to know how a ``config.json`` writes them.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.errors import ModelError


class Numbers(enum.Enum):
    """Type of the weights' numbers."""

    FP8 = "fp8"
    MXFP4 = "mxfp4"
    """FP4 (E2M1), two to a byte, with a power of two for each 32 columns of a row (OCP Microscaling Formats)."""


class Scales(enum.Enum):
    """Part of a weight [N, K] that shares one scale."""

    TENSOR = "tensor"
    CHANNEL = "channel"
    """A row."""
    BLOCK = "block"


class Activations(enum.Enum):
    """Part of a product's input [T, K] that is rounded to FP8 with one scale. The format decides, never T."""

    UNCHANGED = "unchanged"
    """Inputs are not rounded."""
    TOKEN = "token"
    """A row, scaled by its largest value."""
    GROUP = "group"
    """The values of a row that meet one block of the weight, scaled by their largest one."""
    STATIC = "static"
    """All, by a scale from the checkpoint."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """Format of a model's linear layers that are quantized."""

    method: str
    """``quant_method`` of the checkpoint; "online" for weights that are quantized while they are loaded."""
    weights: Scales
    activations: Activations
    block: tuple[int, int] = (128, 128)
    """Rows and columns of a block; of use with ``Scales.BLOCK`` and ``Activations.GROUP``."""
    scale_name: str = "weight_scale"
    """Last part of the names of the weights' scales."""
    targets: tuple[str, ...] = ()
    """Regular expressions of the modules that are quantized; none: all linear layers."""
    ignored: tuple[str, ...] = ()
    """Regular expressions of the modules that are not."""
    aliases: tuple[tuple[str, str], ...] = ()
    """Regular expressions of parts of our modules' names, and what checkpoints have in their places. Modules are found
    by both names.
    """
    file: str = "config.json"
    """File that says so, for errors."""
    numbers: Numbers = Numbers.FP8
    has_fp8_cache: bool = False
    """True if the checkpoint is made for keys and values in FP8."""

    @property
    def is_online(self) -> bool:
        """True if the checkpoint's weights are of 16 or 32 bits."""
        return self.method == "online"

    @property
    def keeps_order(self) -> bool:
        """True if kernels compute a row's products in one order of sums, whatever other rows there are."""
        if self.numbers is Numbers.MXFP4:
            return True
        has_blocks = self.weights is Scales.BLOCK or self.activations is Activations.GROUP
        return not has_blocks or self.block[1] == 128

    def covers(self, modules: Sequence[str]) -> bool:
        """True if modules that are computed as one layer are quantized; ``ModelError`` if only some of them are."""
        found = {module: self._covers_one(module) for module in modules}
        if len(set(found.values())) > 1:
            inside, outside = (
                next(name for name, is_in in found.items() if is_in is wanted) for wanted in (True, False)
            )
            raise ModelError(
                f"{self.file}: quantization_config: {inside} is quantized and {outside} is not, and the two are one"
                " product: either both or neither should be"
            )
        return all(found.values())

    def __str__(self) -> str:
        rows, columns = self.block
        weights = f"{rows}x{columns} blocks" if self.weights is Scales.BLOCK else self.weights.value
        inputs = f"groups of {columns}" if self.activations is Activations.GROUP else self.activations.value
        return (
            f"{self.numbers.value} ({self.method}): weights by {weights}, activations {_HOW[self.activations]}{inputs}"
        )

    def _covers_one(self, module: str) -> bool:
        names = {module}
        for part, name in self.aliases:
            names |= {re.sub(part, name, known) for known in names}
        if any(pattern.match(name) for pattern in _compiled(self.ignored) for name in names):
            return False
        return not self.targets or any(pattern.match(name) for pattern in _compiled(self.targets) for name in names)


@functools.lru_cache(maxsize=8)
def _compiled(patterns: tuple[str, ...]) -> tuple[re.Pattern[str], ...]:
    """Patterns to match with; models with experts have tens of thousands of modules."""
    return tuple(map(re.compile, patterns))


_HOW = {Activations.UNCHANGED: "", Activations.STATIC: "", Activations.TOKEN: "by ", Activations.GROUP: "by "}
MXFP4_GROUP = 32
"""Columns of a row that share a scale."""
MXFP4 = Quantization(
    "mxfp4", Scales.BLOCK, Activations.UNCHANGED, (1, MXFP4_GROUP), targets=(r"model\.layers\.\d+\.mlp\.experts\.",),
    numbers=Numbers.MXFP4,
)  # fmt: skip
"""Experts of gpt-oss, as published."""
_ROUTERS = r".*(router|\.gate\.|\.shared_expert_gate$)"
ONLINE = Quantization(
    "online", Scales.CHANNEL, Activations.TOKEN, ignored=(r"lm_head$", r".*\.linear_attn\.in_proj_(a|b|ba)$", _ROUTERS)
)
"""Made while loading: ``--quantization fp8``. Routers stay as they are: rounded ones choose other experts."""
