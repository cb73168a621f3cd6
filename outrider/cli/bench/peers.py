"""``outrider bench peers``: other engines on the same pair."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli.bench.flags import Device, Dtype, Save, Target
from outrider.cli.bench.harness import (
    bar,
    benchmark,
    is_synthetic,
    model_name,
    pair_name,
    print_weights_notes,
    save,
    table,
)
from outrider.cli.flag_groups import with_flag_groups
from outrider.cli.options import output
from outrider.demo import DRAFT, TARGET
from outrider.errors import ConfigError

_HEADS = (
    "engine",
    "users",
    "first\ntoken ms",
    "ms a\ntoken",
    "tok/s\nper user",
    "tok/s\nper GPU",
    "prompts as\nthe first",
)

Peers = Annotated[
    list[str] | None,
    typer.Option("--peer", help="Engine to measure; may be repeated.", show_default="all that are installed"),
]


@dataclass(frozen=True, slots=True)
class PeerRequestFlags:
    """Requests of each engine."""

    num_prompts: Annotated[int, typer.Option(min=1, help="Requests of each number of users, at least.")] = 4
    input_len: Annotated[int, typer.Option("--input-len", min=1, help="Prompt tokens.")] = 64
    output_len: Annotated[int, typer.Option("--output-len", min=2, help="New tokens.")] = 64
    max_concurrency: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Requests at the same time; may be repeated: each engine starts once.", show_default="1"
        ),
    ] = None
    runs: Annotated[int, typer.Option(min=1, help="Timed repetitions of each number of users, at least.")] = 3
    seed: Annotated[int, typer.Option(min=0, help="Seed of the prompts.")] = 0

    @property
    def users(self) -> list[int]:
        """Numbers of requests at the same time."""
        return self.max_concurrency or [1]

    def loads(self, vocab_size: int) -> Any:  # noqa: ANN401 - a benchmark's
        """The prompts of each number of users."""
        random_prompts = benchmark("serving.workload").random_prompts
        return benchmark("peers.run").make_loads(
            self.users,
            self.runs,
            self.num_prompts,
            lambda count: random_prompts(count, self.input_len, vocab_size, self.seed),
        )


@dataclass(frozen=True, slots=True)
class EngineFlags:
    """Engines, and how they load the pair."""

    peer: Peers = None
    num_speculative_tokens: Annotated[
        int, typer.Option("--num-speculative-tokens", "-k", min=1, help="Maximum draft length.")
    ] = 4
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="GPUs of vLLM's models.")] = 1
    packages: Annotated[
        Path | None, typer.Option(help="Folder of packages that the engines alone see, such as an unpacked vLLM.")
    ] = None
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Share of a GPU's memory for vLLM.", show_default="vLLM's own"),
    ] = None
    load_format: Annotated[str, typer.Option(help="safetensors, or dummy: random weights, for vLLM alone.")] = (
        "safetensors"
    )
    log: Annotated[Path | None, typer.Option(help="File for all that the engines print.")] = None
    device: Device = "auto"
    dtype: Dtype = "auto"

    @property
    def folder(self) -> str | None:
        """Folder of the engines' own packages."""
        return None if self.packages is None else str(self.packages.absolute())

    def check(self) -> None:
        """Raise a ``ConfigError`` before an engine is started."""
        if self.packages is not None and not self.packages.is_dir():
            raise ConfigError("--packages", f"{self.packages} is not a folder")
        if self.load_format not in {"safetensors", "dummy"}:
            raise ConfigError("--load-format", f"must be safetensors or dummy, not {self.load_format!r}")

    def names(self, *, has_draft: bool, has_many_users: bool) -> tuple[str, ...]:
        """Engines that were named, else those installed that can run the load."""
        if self.peer:
            return tuple(self.peer)
        engines = benchmark("peers.engines")
        unfit = set() if has_draft else set(engines.SPECULATIVE)
        unfit |= set(engines.ONE_USER) if has_many_users else set()
        return tuple(name for name in benchmark("peers.run").installed(self.folder) if name not in unfit)

    def pair(self, target: Path, draft: Path | None, max_length: int) -> Any:  # noqa: ANN401 - a benchmark's
        """The pair as the engines load it."""
        return benchmark("peers.engines").Pair(
            target=str(target),
            draft=None if draft is None else str(draft),
            device=self.device,
            dtype="float32" if self.dtype == "auto" and self.device == "cpu" else self.dtype,
            draft_length=self.num_speculative_tokens,
            max_length=max_length + self.num_speculative_tokens + 1,
            tensor_parallel_size=self.tensor_parallel_size,
            load_format=self.load_format,
            gpu_memory_utilization=self.gpu_memory_utilization,
        )


@with_flag_groups
def peers(
    target: Target = None,
    *,
    draft_model: Annotated[Path | None, typer.Option(help="Folder of the draft.")] = None,
    engines: EngineFlags,
    load: PeerRequestFlags,
    save_as: Save = None,
) -> None:
    """Measure other engines on the same pair: greedy, each engine in a process of its own."""
    bench = benchmark("peers.run")
    folders = (TARGET, DRAFT) if target is None else (target, draft_model)
    engines.check()
    names = engines.names(has_draft=folders[1] is not None, has_many_users=max(load.users) > 1)
    pair = engines.pair(*folders, load.input_len + load.output_len)
    plan = bench.PeerPlan(
        engines=names,
        pair=pair,
        loads=load.loads(_vocab_size(folders[0])),
        num_tokens=load.output_len,
        packages=engines.folder,
        log=engines.log,
    )
    with bar("engines", len(names)) as advance:
        outcomes = bench.run_plan(plan, on_done=advance)
    output.print(table(_HEADS, bench.to_rows(outcomes, pair)))
    facts = {
        "pair": pair_name(*folders),
        "target": model_name(folders[0]),
        "synthetic": is_synthetic(folders[0]),
    }
    print_weights_notes({**facts, "load_format": engines.load_format})
    if save_as is not None:
        save(bench.to_result(outcomes, plan, name=save_as, configuration=facts))


def _vocab_size(folder: Path) -> int:
    path = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return int(config["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError("TARGET", f"{path} cannot be read: {error}") from error
