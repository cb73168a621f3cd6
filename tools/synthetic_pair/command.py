"""Make a pair of models of real size without downloading anything.

    python tools/make_pair.py synthetic 8B 1B --acceptance 0.75 --out pairs/8b-1b

writes `OUT/target` and `OUT/draft` in the Hugging Face layout, and `OUT/synthetic_pair.json`, which says how they
were made. The models know nothing: each costs what a real model of its shape costs (all matrices are random and dense,
read and multiplied), while greedy decoding walks one cycle over the whole vocabulary, and the draft foretells the next
token of the cycle as often as `--acceptance` says, within 0.01 over 10,000 tokens. Figures measured with such a pair
say what the system costs, not what a real pair of models would gain; every table that uses one must say so.

    python tools/make_pair.py synthetic 8B eagle3 --acceptance 0.8 --out pairs/8b-eagle3

writes an EAGLE-3 head of the target's sizes with a reduced vocabulary of 32,000 tokens, which decoding then stays in;
`dflash` a block drafter of five layers, and `mtp` a layer in the folder of a target whose architecture is then MiMo's.
"""

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from outrider.errors import ConfigError
from outrider.model_executor.device_setup import prepare_device
from outrider.model_executor.synthetic.cycle import PairMap
from outrider.model_executor.synthetic.recipe import Recipe
from synthetic_pair.dflash import write_dflash
from synthetic_pair.eagle3 import PUBLISHED_VOCAB, write_eagle3
from synthetic_pair.folders import DEFAULT_SHARD_BYTES, tensor_bytes, write_folder, write_shards
from synthetic_pair.mtp import write_mtp
from synthetic_pair.shapes import SHAPES, Shape, find_shape

HEADS = {"eagle3": "an EAGLE-3 head", "mtp": "an MTP layer", "dflash": "a DFlash drafter"}
"""Heads that can be made, by the method's name."""
_VOCABULARIES = {"eagle3": PUBLISHED_VOCAB}
"""Tokens of a head where nothing else is asked for; of all others the target's."""
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def make_pair(
    out: Path,
    target: Shape,
    draft: Shape,
    *,
    acceptance: float,
    foreseen: float = 0.0,
    later_acceptance: float | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    with_weights: bool = True,
) -> PairMap:
    """Write both folders and what they are; returns the map they walk. `ValueError` when the shapes do not fit.

    Without weights the folders are for load format "synthetic".
    """
    if target.vocab_size != draft.vocab_size:
        raise ValueError(f"the target has {target.vocab_size} tokens and the draft {draft.vocab_size}: no pair")
    recipes = {
        role: Recipe(role, acceptance, foreseen, seed, later_acceptance=later_acceptance)
        for role in ("target", "draft")
    }
    pair = recipes["target"].map_of(target.vocab_size)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns) as bars:
        for role, shape in (("target", target), ("draft", draft)):
            write_folder(out / role, shape, recipes[role], dtype)
            if with_weights:
                bar = bars.add_task(role, total=tensor_bytes(shape, dtype))
                prepare_device(device, "auto", None)
                maker = recipes[role].maker(shape, dtype, torch.device(device))
                write_shards(out / role, maker, shard_bytes=shard_bytes, progress=partial(bars.advance, bar))
    asked = {"acceptance": acceptance, "later_acceptance": later_acceptance, "foreseen": foreseen, "seed": seed}
    _describe(out, target, draft, pair, asked)
    return pair


def make_head(
    out: Path,
    method: str,
    target: Shape,
    *,
    acceptance: float,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    draft_vocab_size: int | None = None,
    with_weights: bool = True,
) -> PairMap:
    """Write a target, without weights for load format "synthetic", and a head of one of ``HEADS``, which always has its
    own; an MTP layer lies in the target's folder. ``ValueError`` for what does not fit.
    """
    target = target.with_mtp() if method == "mtp" else target
    if method == "mtp" and draft_vocab_size is not None:
        raise ValueError("draft_vocab_size: an MTP layer drafts with the target's head, over all of its tokens")
    size = min(draft_vocab_size or _VOCABULARIES.get(method, target.vocab_size), target.vocab_size)
    recipes = {role: Recipe(role, acceptance, 0.0, seed, size) for role in ("target", "draft")}
    prepare_device(device, "auto", None)
    where = torch.device(device)
    write_folder(out / "target", target, recipes["target"], dtype)
    if with_weights:
        write_shards(out / "target", recipes["target"].maker(target, dtype, where), progress=lambda _: None)
    pair = recipes["target"].map_of(target.vocab_size)
    if method == "mtp":
        pair = write_mtp(out / "target", target, recipes["target"], dtype, where)
    elif method == "dflash":
        write_dflash(out / "draft", target, recipes["draft"], dtype, where)
    else:
        # The embedding is the target's, what follows which token the draft's.
        write_eagle3(out / "draft", target, recipes, dtype, where)
    asked = {"acceptance": acceptance, "seed": seed, "draft_vocab_size": size}
    content = {"synthetic": HEADS[method], "target": dataclasses.asdict(target), "asked": asked}
    (out / "synthetic_pair.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return pair


def _describe(out: Path, target: Shape, draft: Shape, pair: PairMap, asked: dict[str, float | None]) -> None:
    wrong = ~pair.agrees
    description = {
        "synthetic": "random weights; the next token is a function of the last one",
        "target": dataclasses.asdict(target) | {"num_parameters": target.num_parameters},
        "draft": dataclasses.asdict(draft) | {"num_parameters": draft.num_parameters},
        "asked": asked,
        "over_the_whole_cycle": {
            "acceptance": float(pair.agrees.mean()),
            "foreseen": float(pair.foreseen[wrong].mean()) if wrong.any() else None,
        },
    }
    (out / "synthetic_pair.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def main(
    target_shape: Annotated[str, typer.Argument(help=f"One of {', '.join(SHAPES)}; or 8B, 1B, 3B, 70B, 32B, 0.6B.")],
    draft_shape: Annotated[str, typer.Argument(help="The same, of the same family; or eagle3, mtp, dflash.")],
    *,
    acceptance: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, help="Acceptance rate of judged tokens (those up to the first rejection of a step)."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write to.")],
    later_acceptance: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Acceptance in the second half of the cycle, of a draft model."),
    ] = None,
    foreseen: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Of the others, the share where the true token is the second choice."),
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Another seed, another cycle and other weights.")] = 0,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(_DTYPES)}.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="Where the random numbers are made; cuda is much faster.")] = "cpu",
    no_weights: Annotated[
        bool,
        typer.Option("--no-weights", help="Write no weights: --load-format synthetic makes them where they are used."),
    ] = False,
    draft_vocab_size: Annotated[
        int | None,
        typer.Option(min=2, help="Of an EAGLE-3 head or a DFlash drafter.", show_default="32000; the target's"),
    ] = None,
    shard_gib: Annotated[float, typer.Option(min=0.001, help="Size of a file.")] = DEFAULT_SHARD_BYTES / 2**30,
) -> None:
    """Make a pair of real size whose weights are random, and say where it is."""
    if dtype not in _DTYPES:
        raise typer.BadParameter(f"{dtype!r} is not one of {', '.join(_DTYPES)}", param_hint="--dtype")
    try:
        if draft_shape in HEADS:
            pair = make_head(
                out, draft_shape, find_shape(target_shape), acceptance=acceptance, seed=seed, dtype=_DTYPES[dtype],
                device=device, draft_vocab_size=draft_vocab_size, with_weights=not no_weights,
            )  # fmt: skip
            walked = pair.order[: draft_vocab_size or _VOCABULARIES.get(draft_shape)]
            typer.echo(f"{out}: {HEADS[draft_shape]}, acceptance {pair.agrees[walked].mean():.4f}")
            return
        pair = make_pair(
            out,
            find_shape(target_shape),
            find_shape(draft_shape),
            acceptance=acceptance,
            foreseen=foreseen,
            later_acceptance=later_acceptance,
            seed=seed,
            dtype=_DTYPES[dtype],
            device=device,
            shard_bytes=int(shard_gib * 2**30),
            with_weights=not no_weights,
        )
    except (ValueError, ConfigError) as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(f"{out}: synthetic pair, acceptance {pair.agrees.mean():.4f} over the whole cycle")
