"""``python -m tests.faults.invariance``: a pair with flat logits under load, and every stream against itself alone.

Two drafts serve one target. Users come, share prefixes, go on where they ended, and need more pages than there are;
drafts are killed. Then some streams are written again alone without drafts, and all texts are computed alone,
position by position. Ends with 1 if a stream differs or no text was compared.
``--batch-invariant off`` is the negative control.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from operator import attrgetter
from pathlib import Path

from outrider import AsyncClient
from outrider.config import TargetSettings
from tests.faults.invariance.load import Load, Stream, generate, play
from tests.faults.invariance.reference import Alone
from tests.faults.invariance.weights import FlatShape, write_pair
from tests.faults.stack import Layout, Stack, run_stack

TINY = FlatShape(2, 1, 64, 128, 4, 2, 16, 512, 4096)
_SHOWN = ("preempted", "accepted_tokens_total", "draft_tokens_total", "prefix_cache_hits", "prefix_cache_queries")


def main() -> int:
    """Play what the arguments name."""
    options = _arguments()
    shape = TINY if options.tiny else FlatShape(options.layers, options.draft_layers, layer_share=options.layer_share)
    load = Load(
        options.users, options.tokens, tuple(options.temperature), shape.vocab_size, limit_s=options.load_s,
        kill_every_s=options.kill_every, longest_request=options.longest_request, arrival_s=options.arrival_s,
    )  # fmt: skip
    streams = load.streams()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        target, draft = write_pair(Path(folder), shape, options.device)
        say(f"{shape.num_layers} layers, draft {shape.draft_layers}")
        model = _target_settings(options, target, shape)
        differing = asyncio.run(_served(_layout(options, model, draft, shape), load, streams, options))
        differing += _compare(TargetSettings.model_validate(model | {"model": str(target)}), streams, options.limit_s)
    return int(differing > 0)


def _target_settings(options: argparse.Namespace, folder: Path, shape: FlatShape) -> dict[str, object]:
    return {
        "device": options.device, "dtype": options.dtype, "model": folder, "tensor_parallel_size": options.ranks,
        "batch_invariant": options.batch_invariant, "num_pages": options.pages, "max_model_len": shape.max_length,
        "max_batched_tokens": options.max_batched_tokens, "max_running_requests": options.users,
    }  # fmt: skip


def _layout(options: argparse.Namespace, target: dict[str, object], draft: Path, shape: FlatShape) -> Layout:
    device = "cuda:0" if options.device == "cuda" else options.device
    return Layout(
        num_drafts=options.drafts,
        target=target,
        draft={
            "device": device, "model": draft, "dtype": options.dtype, "num_pages": options.draft_pages,
            "max_model_len": shape.max_length,
        },
        coordinator={
            "max_running_requests": options.users, "draft_length": options.draft_length,
            "num_speculative_tokens": options.longest_draft,
        },
    )  # fmt: skip


def _compare(settings: TargetSettings, streams: list[Stream], limit_s: float) -> int:
    """Streams that differ from their texts alone."""
    found = num_tokens = num_compared = 0
    alone = Alone(settings)
    say("reference ready")
    for stream in filter(attrgetter("output"), streams):
        if time.monotonic() - _BEGAN > limit_s:
            break
        place = alone.first_difference(stream)
        if place is not None:
            found += 1
            say(f"user {stream.seed}, T = {stream.temperature}: token {place} of {len(stream.output)} differs")
        num_compared += 1
        num_tokens += len(stream.output)
    alone.runner.close()
    say(
        f"against each text alone: {found} of {num_compared} streams differ, {num_tokens} tokens;"
        f" {len(streams)} streams in all"
    )
    return found or int(num_compared == 0)


async def _served(layout: Layout, load: Load, streams: list[Stream], options: argparse.Namespace) -> int:
    async with run_stack(layout, options.logs) as stack, AsyncClient(stack.coordinators[0].address) as client:
        say("ready")
        kills = await play(stack, client, load, streams)
        written = sorted(len(stream.output) for stream in streams)
        say(
            f"{len(streams)} users, {sum(written)} tokens ({written[0]} to {written[-1]} each),"
            f" {sum(stream.num_requests for stream in streams)} requests, drafts killed {kills} times"
        )
        await _tell(stack)
        again = streams[: options.again]
        differing = await _again(client, again, options.again_tokens)
        say(f"written again alone, K = 0: {differing} of {len(again)} x {options.again_tokens} tokens differ")
        return differing


async def _again(client: AsyncClient, streams: list[Stream], count: int) -> int:
    """Streams that differ from what they are alone without drafts."""
    differing = 0
    for stream in streams:
        wanted = stream.output[:count]
        if wanted:
            differing += list(await generate(client, stream, stream.prompt, len(wanted), draft_length=0)) != wanted
    return differing


async def _tell(stack: Stack) -> None:
    for process in stack.processes:
        metrics = await process.metrics() or {}
        told = [
            f"{name.removeprefix('outrider_')} {value:g}"
            for name, value in metrics.items()
            if value and any(shown in name for shown in _SHOWN)
        ]
        say(f"{process.name}: {', '.join(told)}")
    for crash in stack.crashes:
        say(f"crash: {crash}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch-invariant", default="on")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--draft-layers", type=int, default=3)
    parser.add_argument("--layer-share", type=float, default=0.15, help="Small: most draft tokens are accepted.")
    parser.add_argument("--drafts", type=int, default=2)
    parser.add_argument("--users", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.8, 1.0])
    parser.add_argument("--draft-length", default="auto")
    parser.add_argument("--longest-draft", type=int, default=4)
    parser.add_argument("--longest-request", type=int, default=2500)
    parser.add_argument("--arrival-s", type=float, default=8.0)
    parser.add_argument("--pages", type=int, default=30_000)
    parser.add_argument("--draft-pages", type=int, default=45_000)
    parser.add_argument("--max-batched-tokens", type=int, default=2048)
    parser.add_argument("--kill-every", type=float, default=20.0)
    parser.add_argument("--load-s", type=float, default=90.0, help="Seconds of the load at most.")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="Seconds after which no more texts are compared.")
    parser.add_argument("--again", type=int, default=8, help="Streams that are written again alone.")
    parser.add_argument("--again-tokens", type=int, default=500)
    parser.add_argument("--folder", help="Where the pair is written.")
    parser.add_argument("--logs", type=Path, help="Folder of the services' logs.")
    return parser.parse_args()


_BEGAN = time.monotonic()


def say(text: str) -> None:
    """A line with the seconds since the start."""
    sys.stdout.write(f"[{time.monotonic() - _BEGAN:.0f} s] {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
