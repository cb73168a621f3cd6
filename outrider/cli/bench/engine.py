"""``outrider bench engine``: one model alone."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli.bench.flags import Device, Dtype, LoadFormat, Quantization, Samples, Save, Warmups, parse_sampling
from outrider.cli.bench.harness import bar, benchmark, is_synthetic, model_name, print_weights_notes, save, table
from outrider.cli.flag_groups import with_flag_groups
from outrider.cli.options import output
from outrider.demo import TARGET

_HEADS = ("what", "batch", "tokens", "context", "median ms", "floor ms", "times the floor")
_GREEDY = '{"temperature": 0}'

BatchSizes = Annotated[
    list[int] | None,
    typer.Option("--batch-size", min=1, help="Sequences in a forward; may be repeated.", show_default="1"),
]
NumTokens = Annotated[
    list[int] | None,
    typer.Option("--num-tokens", min=1, help="Tokens per row of a forward; may be repeated.", show_default="1, 5"),
]
Contexts = Annotated[
    list[int] | None, typer.Option("--context", min=2, help="Context length; may be repeated.", show_default="256")
]
DraftLengths = Annotated[
    list[int] | None,
    typer.Option("--draft-length", min=0, help="Tokens of a draft loop; may be repeated. 0: none.", show_default="4"),
]


Samplings = Annotated[
    list[str] | None,
    typer.Option(
        "--sampling",
        help='Sampling parameters of the draft loops, as JSON: {"temperature": 0.6, "top_p": 0.9}; may be repeated.',
        show_default="greedy",
    ),
]
MostTokens = Annotated[
    int | None, typer.Option("--most-tokens", min=1, help="Maximum total number of tokens of a forward.")
]


@dataclass(frozen=True, slots=True)
class CaseFlags:
    """Forwards and draft loops that are timed."""

    batch_size: BatchSizes = None
    num_tokens: NumTokens = None
    context: Contexts = None
    longest_context: Annotated[
        list[int] | None,
        typer.Option(min=2, help="Also time forwards whose first row has this context; may be repeated."),
    ] = None
    hidden_state_layer: Annotated[
        list[int] | None,
        typer.Option(help="Also time forwards that hand out the states of this layer; may be repeated."),
    ] = None
    draft_length: DraftLengths = None
    sampling: Samplings = None
    most_tokens: MostTokens = None
    samples: Samples = 20
    warmups: Warmups = 3

    def plan(self) -> Any:  # noqa: ANN401 - a benchmark's
        """The benchmark's plan."""
        return benchmark("engine.run").EnginePlan(
            batch_sizes=tuple(self.batch_size or (1,)),
            num_tokens=tuple(self.num_tokens or (1, 5)),
            contexts=tuple(self.context or (256,)),
            draft_lengths=tuple(length for length in self.draft_length or (4,) if length),
            samplings=tuple(parse_sampling(text, "--sampling") for text in self.sampling or [_GREEDY]),
            longest_contexts=tuple(self.longest_context or ()),
            layers=tuple(sorted(self.hidden_state_layer or ())),
            most_tokens=self.most_tokens,
            num_samples=self.samples,
            num_warmups=self.warmups,
        )


@dataclass(frozen=True, slots=True)
class RunnerFlags:
    """Loading and running of the model."""

    page_size: Annotated[int, typer.Option(min=1, help="Tokens in a KV page.")] = 16
    num_threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None
    device: Device = "auto"
    dtype: Dtype = "auto"
    load_format: LoadFormat = "safetensors"
    quantization: Quantization = "none"
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="Number of ranks.")] = 1
    one_shot_all_reduce: Annotated[
        bool, typer.Option(help="Use one-shot kernels for small all-reduces where they are faster.")
    ] = True


@with_flag_groups
def engine(
    model: Annotated[Path, typer.Argument(help="Folder of a model.", show_default="the embedded target")] = TARGET,
    *,
    cases: CaseFlags,
    runner: RunnerFlags,
    save_as: Save = None,
) -> None:
    """Measure one model alone: forwards and draft loops beside the floor of memory and arithmetic."""
    bench, plan = benchmark("engine.run"), cases.plan()
    running = bench.load(model, plan, **dataclasses.asdict(runner))
    with contextlib.closing(running), bar("cases", len(plan.forwards) + len(plan.draft_loops)) as advance:
        series = bench.run_plan(running, plan, on_done=advance)
    for item in series[:2]:
        output.print(f"{item.name.replace('_', ' ')}: {item.samples[0]:.1f} {item.unit}", markup=False)
    output.print(table(_HEADS, bench.to_rows(series)))
    facts = {
        "model": model_name(model),
        "synthetic": is_synthetic(model),
        "load_format": runner.load_format,
        "quantization": runner.quantization,
        "page_size": runner.page_size,
        **({"one_shot_all_reduce": runner.one_shot_all_reduce} if runner.tensor_parallel_size > 1 else {}),
    }
    print_weights_notes(facts)
    if save_as is not None:
        save(bench.to_result(series, running, name=save_as, configuration=facts))
