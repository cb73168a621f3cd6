"""Flags that several benchmarks share."""

from __future__ import annotations

from typing import Annotated

import typer

Save = Annotated[
    str | None, typer.Option("--save", metavar="NAME", help="Write benchmarks/results/NAME.json, raw samples and all.")
]
Samples = Annotated[int, typer.Option("--samples", min=1, help="Timed goes of each case.")]
Warmups = Annotated[int, typer.Option("--warmups", min=0, help="Goes before them that are not timed.")]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda or cuda:N.")]
LoadFormat = Annotated[str, typer.Option("--load-format", help="safetensors, dummy (noise) or synthetic (by recipe).")]
Dtype = Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")]
