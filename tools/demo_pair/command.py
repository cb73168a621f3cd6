"""Make the embedded pair: `python tools/make_pair.py demo STAGE --work FOLDER`, stages in this order.

    corpus    read the standard library's sources, learn the tokenizer, pack the ids
    target    train the target on the text
    draft     sample text from the target, then distil the drafts from the target's logits on corpus and samples
    measure   held-out bits per byte, completions that parse, acceptance
    ship      put the pair and its model card where the package carries them

A head for the shipped pair (an EAGLE-3 head, a DFlash block drafter) needs `corpus --shipped-tokenizer` and then

    eagle3, dflash                  sample text from the target, train the head on its states and distributions
    measure-eagle3, measure-dflash  acceptance, beside the shipped draft's
    ship-eagle3, ship-dflash        put the head beside the pair, and its section into the model card

Every stage reads and writes `--work` (ignored by git). It runs on a CPU or, for a good pair, on an accelerator;
`--steps` shortens a run, to try out the whole path.
"""

import json
import platform
import shutil
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tokenizers import Tokenizer

from demo_pair import corpus, measuring, publish
from demo_pair.card import HEAD_TITLES, add_head_to_card, write_card
from demo_pair.heads.eagle3_training import train_head
from demo_pair.heads.registry import HEADS
from demo_pair.job import TrainingJob
from demo_pair.measuring import MeasuredDraft
from demo_pair.model import DRAFT_SHAPES, TARGET_SHAPE, Llama
from demo_pair.recipes import DRAFT, HEAD_SAMPLED_SHARE, HEAD_TEXT, SHIPPED_DRAFT, TARGET
from demo_pair.training import TrainingRecipe, prepare

app = typer.Typer(help=__doc__, no_args_is_help=True)

Work = Annotated[Path, typer.Option(help="Folder for everything that is not shipped.")]
Device = Annotated[str, typer.Option(help="cuda or cpu.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Training steps; the recipe's own number by default.")]
WORK = Path(".pairdata")
PAIR = Path(__file__).parents[2] / "outrider" / "demo" / "pair"
DEFAULT_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@app.command("corpus")
def make_corpus(
    work: Work = WORK, vocab_size: int = TARGET_SHAPE.vocab_size, *, shipped_tokenizer: bool = False
) -> None:
    """Read the sources, learn the tokenizer or take the shipped one, pack the ids."""
    work.mkdir(parents=True, exist_ok=True)
    known = Tokenizer.from_file(str(PAIR / "target" / "tokenizer.json")) if shipped_tokenizer else None
    tokenizer, packed = corpus.build(vocab_size, tokenizer=known)
    tokenizer.save(str(work / "tokenizer.json"))
    packed.save(work / "corpus.npz")
    _report(work, "corpus", {
        "python": platform.python_version(),
        "bytes": packed.num_bytes,
        "files": packed.num_files,
        "tokens": {"library": len(packed.library), "tests": len(packed.tests), "held_out": len(packed.held_out)},
    })  # fmt: skip


@app.command("target")
def make_target(work: Work = WORK, device: Device = DEFAULT_DEVICE, steps: Steps = None) -> None:
    """Train the target on the text."""
    job = TrainingJob(work, device)
    _, histories = job.fit({"target": TARGET_SHAPE}, _shortened(TARGET, steps), job.corpus_rows, None)
    _report(work, "target", histories)


@app.command("draft")
def make_draft(work: Work = WORK, device: Device = DEFAULT_DEVICE, steps: Steps = None) -> None:
    """Sample text from the target and distil the drafts."""
    job = TrainingJob(work, device)
    target = prepare(publish.load(work / "target"), job.device)
    began = time.monotonic()
    data = job.draft_rows(target)
    seconds = time.monotonic() - began
    shapes = {f"draft-{name}": shape for name, shape in DRAFT_SHAPES.items()}
    _, histories = job.fit(shapes, _shortened(DRAFT, steps), data, target)
    _report(work, "draft", histories | {"sampling_seconds": seconds})


@app.command("measure")
def measure(work: Work = WORK, device: Device = DEFAULT_DEVICE) -> None:
    """Measure the published weights in float32."""
    job = TrainingJob(work, device)
    target = publish.load(work / "target").to(job.device)
    held_out = job.corpus.held_out, job.corpus.num_bytes["held_out"], job.device
    for name in DRAFT_SHAPES:
        draft = publish.load(work / f"draft-{name}").to(job.device)
        bits = measuring.bits_per_byte(draft, *held_out)
        _report(work, f"measure-draft-{name}", {"bits_per_byte": bits, "acceptance": job.acceptance(target, draft)})
    bits = measuring.bits_per_byte(target, *held_out)
    _report(work, "measure-target", {"bits_per_byte": bits, "completions": job.completions(target)})


@app.command("ship")
def ship(work: Work = WORK, pair: Path = PAIR, draft: str = SHIPPED_DRAFT) -> None:
    """Put the target, one of the drafts and the model card where the package carries them."""
    for source, name in ((f"draft-{draft}", "draft"), ("target", "target")):
        shutil.rmtree(pair / name, ignore_errors=True)
        shutil.copytree(work / source, pair / name, copy_function=shutil.copyfile)
    write_card(work, pair, draft)


MaxSeconds = Annotated[float | None, typer.Option(help="End training by then.")]
Sampled = Annotated[float, typer.Option(help="Share of the recipe's rows of sampled text.")]
BeginWith = Annotated[Path | None, typer.Option(help="Folder of a published head to go on training.")]
TextSeed = Annotated[int, typer.Option(min=0, help="Another one has the target write other text.")]


def _add_commands(method: str) -> None:
    """Commands METHOD, measure-METHOD and ship-METHOD of a kind of head."""
    title = HEAD_TITLES[method]

    @app.command(method, help=f"Train the {title} for the shipped target.")
    def make(
        work: Work = WORK,
        device: Device = DEFAULT_DEVICE,
        steps: Steps = None,
        *,
        max_seconds: MaxSeconds = None,
        sampled: Sampled = 1.0,
        begin_with: BeginWith = None,
        text_seed: TextSeed = 0,
    ) -> None:
        job = TrainingJob(work, device, text_seed)
        _make_head(method, job, steps, max_seconds=max_seconds, sampled=sampled, begin_with=begin_with)

    @app.command(
        f"measure-{method}", help=f"Acceptance of the {title} and of the shipped draft, after the same prompts."
    )
    def measure(work: Work = WORK, device: Device = DEFAULT_DEVICE) -> None:
        _measure_head(method, work, device)

    @app.command(
        f"ship-{method}", help=f"Put the {title} beside the shipped pair, and its section into the model card."
    )
    def ship(work: Work = WORK, pair: Path = PAIR) -> None:
        _ship_head(method, work, pair)


def _make_head(
    method: str,
    job: TrainingJob,
    steps: int | None,
    *,
    max_seconds: float | None,
    sampled: float,
    begin_with: Path | None,
) -> None:
    kind = HEADS[method]
    target = prepare(publish.load(PAIR / "target"), job.device)
    began = time.monotonic()
    texts = [replace(text, rows=max(4, int(text.rows * sampled))) for text in HEAD_TEXT]
    data = job.draft_rows(target, texts, HEAD_SAMPLED_SHARE)
    seconds = time.monotonic() - began
    head = kind.make(target).to(job.device) if begin_with is None else kind.load(begin_with, target)
    recipe = replace(kind.recipe if steps is None else replace(kind.recipe, steps=steps), max_seconds=max_seconds)
    history = train_head(head, recipe, data, kind.trainer)
    kind.publish(head, job.work / method)
    _report(job.work, method, asdict(history) | {
        "is_continued": begin_with is not None,
        "sampling_seconds": seconds,
        "num_tokens": job.num_written,
        "sampled_share": HEAD_SAMPLED_SHARE,
        "corpus_tokens": len(job.corpus.library) + len(job.corpus.tests),
    })  # fmt: skip


def _measure_head(method: str, work: Path, device: str) -> None:
    job = TrainingJob(work, device)
    target = publish.load(PAIR / "target").to(job.device)
    drafts: dict[str, Llama | MeasuredDraft] = {
        method: HEADS[method].load_draft(work / method, target),
        "draft": publish.load(PAIR / "draft").to(job.device),
    }
    _report(work, f"measure-{method}", {name: job.acceptance(target, draft) for name, draft in drafts.items()})


def _ship_head(method: str, work: Path, pair: Path) -> None:
    shutil.rmtree(pair / method, ignore_errors=True)
    shutil.copytree(work / method, pair / method, copy_function=shutil.copyfile)
    add_head_to_card(work, pair, method)


for _method in HEADS:
    _add_commands(_method)


def _shortened(recipe: TrainingRecipe, steps: int | None) -> TrainingRecipe:
    return recipe if steps is None else replace(recipe, steps=steps)


def _report(work: Path, stage: str, figures: dict[str, Any]) -> None:
    (work / f"{stage}.json").write_text(json.dumps(figures, indent=1) + "\n")
