"""Pair of models that a benchmark of the whole system runs against, and its start.

Owns the way from a command's flags to a stack of three processes, or to what runs at an address.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.cli.bench.harness import is_synthetic, pair_name
from outrider.cli.settings_flags import parse_set
from outrider.cli.stack.held_ports import hold_port
from outrider.cli.stack.plan import StackPlan
from outrider.cli.stack.preparation import prepare_stack
from outrider.config import FlagNames, load_all
from outrider.config.typed_names import SettingKey
from outrider.demo import DRAFT, TARGET, require_pair
from outrider.errors import ConfigError
from outrider.generation import ModelInfo
from outrider.process.extras import require_all, require_extras
from outrider.types import NOISE_MARK, SYNTHETIC_MARK

_OPTIONS: dict[SettingKey, str] = {
    ("draft", "model"): "draft_model",
    ("target", "device"): "device",
    ("draft", "device"): "draft_device",
    ("target", "dtype"): "dtype",
    ("draft", "dtype"): "dtype",
    ("target", "load_format"): "load_format",
    ("draft", "load_format"): "load_format",
    ("coordinator", "num_speculative_tokens"): "num_speculative_tokens",
}
"""Setting: the option that sets it."""
_OF_STARTING = {"load_format", "settings"}
"""Flags that have a part only where services are started."""


@dataclass(frozen=True, slots=True)
class Where:
    """Subject of a measurement: a pair that is started here, or services at an address."""

    target: Path | None
    draft: Path | None
    address: str | None

    @property
    def is_embedded(self) -> bool:
        """True if it is the embedded pair."""
        return self.target == TARGET

    def pair(self, info: ModelInfo) -> str:
        """The pair's name in tables."""
        if self.target is None:
            return f"{info.target_model} / {info.draft_model or 'none'}"
        return pair_name(self.target, self.draft)

    def stated(self, **flags: object) -> dict[str, object]:
        """Configuration that a result takes from the command's flags. Flags of starting say nothing of services that
        ran already.
        """
        return {key: value for key, value in flags.items() if self.address is None or key not in _OF_STARTING}

    def weights(self, info: ModelInfo) -> dict[str, object]:
        """Facts of the weights for a result."""
        marked = {"load_format": "dummy"} if info.target_model.endswith(NOISE_MARK) else {}
        return {"synthetic": is_synthetic(self.target) or info.target_model.endswith(SYNTHETIC_MARK), **marked}


def find_pair(target: Path | None, draft: Path | None, address: str | None) -> Where:
    """Subject that the flags name; the embedded pair when they name nothing."""
    if draft is not None and target is None and address is None:
        raise ConfigError("--draft-model", "needs its target: give both folders, or neither for the embedded pair")
    if address is None and target is None:
        require_all(lambda: require_extras(["engine"], "this benchmark"), require_pair)
        return Where(TARGET, DRAFT, None)
    if address is None:
        return Where(target, draft, None)
    if draft is not None:
        raise ConfigError("--draft-model", "has no part in measuring what runs at an address already")
    return Where(target, None, address)


def exact_within(device: str, dtype: str) -> float:
    """Gap of log-probabilities that passes as a tie: float32 rounds, smaller types move them by a tenth or two."""
    return 1e-3 if dtype == "float32" or (dtype == "auto" and device == "cpu") else 0.25


def plan_pair(
    where: Where, devices: dict[str, str], num_speculative_tokens: int | None, set_options: list[str] | None
) -> StackPlan:
    """Three processes on this host; the ``devices`` are a command's own flags. Refuses at once what cannot work."""
    flags: dict[SettingKey, Any] = {
        ("target", "model"): str(where.target),
        ("draft", "model"): None if where.draft is None else str(where.draft),
        ("target", "device"): devices["device"],
        ("draft", "device"): devices["draft_device"],
        ("target", "dtype"): devices["dtype"],
        ("draft", "dtype"): devices["dtype"],
        ("target", "load_format"): devices["load_format"],
        ("draft", "load_format"): devices["load_format"],
        ("coordinator", "num_speculative_tokens"): num_speculative_tokens,
        # A length that is named is measured; without one the coordinator chooses.
        ("coordinator", "draft_length"): None if num_speculative_tokens is None else "fixed",
        ("coordinator", "port"): hold_port(),
    }
    given = parse_set(set_options)
    names = {place: f"--{option.replace('_', '-')}" for place, option in _OPTIONS.items()}
    names |= {place: f"--set {'.'.join(place)}" for place in given}
    return prepare_stack(load_all({**flags, **given}, flag_names=FlagNames(names)))
