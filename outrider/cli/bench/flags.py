"""Flags that several benchmarks share."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, get_args

import typer

from outrider.cli.settings_flags import SetOptions
from outrider.cli.stack.gpus import find_gpus
from outrider.client.grammars import build_grammar
from outrider.config import fields
from outrider.errors import ConfigError, InvalidRequestError
from outrider.types import SamplingParams


def _plain_name(name: str | None) -> str | None:
    if name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise typer.BadParameter(f"{name!r} should be a name of letters, digits, dots and dashes, not a path")
    return name


def _one_of(names: object) -> Callable[[str], str]:
    """Check that a flag's value is one of a literal type."""

    def known(name: str) -> str:
        if name not in get_args(names):
            raise typer.BadParameter(f"{name!r} should be one of {', '.join(get_args(names))}")
        return name

    return known


def _found_device(name: str) -> str:
    """A result names the device that was measured."""
    if name != "auto":
        return name
    return "cuda" if find_gpus().names else "cpu"


Save = Annotated[
    str | None,
    typer.Option(
        "--save",
        metavar="NAME",
        callback=_plain_name,
        help="Write benchmarks/results/NAME.json, with raw samples.",
    ),
]
Samples = Annotated[int, typer.Option("--samples", min=1, help="Timed repetitions of each case.")]
Warmups = Annotated[int, typer.Option("--warmups", min=0, help="Untimed repetitions before them.")]
Device = Annotated[str, typer.Option("--device", callback=_found_device, help="auto, cpu, cuda or cuda:N.")]
LoadFormat = Annotated[
    str,
    typer.Option(
        "--load-format",
        callback=_one_of(fields.LoadFormat),
        help="safetensors, dummy (random weights) or synthetic (from a recipe).",
    ),
]
Quantization = Annotated[
    str,
    typer.Option(
        "--quantization",
        callback=_one_of(fields.Quantization),
        help="fp8: weights of 16 bits become FP8 while they are loaded.",
    ),
]
Dtype = Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")]


Target = Annotated[Path | None, typer.Argument(help="Folder of the target.", show_default="the embedded pair's")]


@dataclass(frozen=True, slots=True)
class PairFlags:
    """The draft of the pair that is measured, and how both models are started, or where they run already."""

    draft_model: Annotated[Path | None, typer.Option(help="Folder of the draft.")] = None
    address: Annotated[
        str | None, typer.Option("--address", "-a", help="Measure a running coordinator; start nothing.")
    ] = None
    device: Device = "auto"
    draft_device: Annotated[str | None, typer.Option(help="Device of the draft, if different.")] = None
    dtype: Dtype = "auto"
    load_format: LoadFormat = "safetensors"
    set_options: SetOptions = None

    @property
    def devices(self) -> dict[str, str]:
        """Devices and formats of the models."""
        return {
            "device": self.device,
            "draft_device": self.draft_device or self.device,
            "dtype": self.dtype,
            "load_format": self.load_format,
        }


def parse_sampling(text: str, flag: str) -> SamplingParams:
    """Sampling parameters, and a ``json_schema`` or ``regex``, from a JSON object; for anything else ``ConfigError``,
    which names the flag.
    """
    try:
        given = json.loads(text)
        grammar = build_grammar({name: given.pop(name) for name in ("json_schema", "regex") if name in given})
        return SamplingParams(**given, grammar=grammar)
    except (ValueError, TypeError, AttributeError, InvalidRequestError) as error:
        raise ConfigError(flag, f"{text!r} is no JSON object of sampling parameters: {error}") from error
