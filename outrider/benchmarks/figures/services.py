"""Synthetic pairs, and the services that run them."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outrider.benchmarks.figures.rows import ServedPair
from outrider.benchmarks.figures.session import ROOT, MeasuringSession, stop
from outrider.cli.stack.held_ports import hold_port

Addresses = tuple[str, str | None]
"""Addresses of the coordinators with chosen and with fixed lengths."""


def make_pair(session: MeasuringSession, services: ServedPair, *, with_weights: bool = False) -> Path:
    """Folder of the pair, made if it is not there."""
    target, draft = _shapes(session, services)
    name = f"pair-{target}-{draft}-{services.acceptance:g}"
    options = ["--acceptance", f"{services.acceptance:g}", "--device", session.device]
    if services.later_acceptance is not None:
        name += f"-{services.later_acceptance:g}"
        options += ["--later-acceptance", f"{services.later_acceptance:g}"]
    if services.foreseen:
        name += f"-foreseen-{services.foreseen:g}"
        options += ["--foreseen", f"{services.foreseen:g}"]
    if with_weights:
        name += "-weights"
    else:
        options += ["--no-weights"]
    folder = session.out / name
    if not (folder / "synthetic_pair.json").exists():
        tool = str(ROOT / "tools/make_pair.py")
        session.run([sys.executable, tool, "synthetic", target, draft, "--out", str(folder), *options], name)
    return folder


def _shapes(session: MeasuringSession, services: ServedPair) -> tuple[str, str]:
    """Shapes of target and draft; of a head its name."""
    if session.is_tiny:
        return "tiny", services.draft if services.has_head else "tiny-draft"
    return services.target, services.draft


def token_before_fall(target: Path, num_tokens: int) -> int:
    """The token ``num_tokens`` before the one at which the later acceptance begins."""
    from outrider.model_executor.synthetic.recipe import read_recipe

    vocab_size = json.loads((target / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    order = read_recipe(target).map_of(vocab_size).order
    return int(order[len(order) // 2 - num_tokens])


def state_layers(draft: str, pair: Path) -> str:
    """Layers that a head reads, so that graphs hand them out from the start."""
    from outrider.model_executor.draft_heads.config import read_eagle3_config
    from outrider.model_executor.draft_heads.dflash_config import read_dflash_config

    if draft == "mtp":
        return "-1"
    read = read_eagle3_config if draft == "eagle3" else read_dflash_config
    config: object = read(pair / "draft", pair / "target")
    return ",".join(map(str, getattr(config, "hidden_state_layers")))  # noqa: B009


def link_token_file(session: MeasuringSession) -> Path:
    """File with the token of all links, made if it is not there."""
    path = session.out / "link-token"
    if not path.exists():
        path.touch(mode=0o600)
        path.write_text(secrets.token_hex(16))
    return path


@contextmanager
def serving(session: MeasuringSession, services: ServedPair, log: str) -> Iterator[Addresses]:
    """Addresses of the coordinators."""
    pair = make_pair(session, services)
    token = link_token_file(session)
    port, target, draft, other = (hold_port() for _ in range(4))
    command = ["-m", "outrider.cli", "serve", str(pair / "target"), "--load-format", "synthetic", "--no-http"]
    command += [*_draft_flags(services, pair), *_size_flags(session, services)]
    for role, shape in zip(("target", "draft"), _shapes(session, services), strict=True):
        command += ["--set", f"{role}.served_model_name={shape}"]  # by which results name the pair
    command += ["--port", str(port), "--set", f"target.port={target}", "--set", f"draft.port={draft}"]
    command += ["-vv", "--set", "coordinator.log_level=debug"] if session.logs_choices else []
    for role in ("target", "draft", "coordinator"):
        command += ["--set", f"{role}.link_token_file={token}"]
    fixed = ["-m", "outrider_coordinator", "--port", str(other), "--target-address", f"127.0.0.1:{target}"]
    fixed += ["--draft-address", f"127.0.0.1:{draft}", "--link-token-file", str(token)]
    fixed += ["--draft-length", "fixed", "--num-speculative-tokens", "16"]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        processes.append(session.start_until("is ready at", session.command(*command), f"{log}-serve"))
        if services.with_fixed:
            processes.append(session.start_until("the draft.* is attached", session.command(*fixed), f"{log}-fixed"))
        yield f"127.0.0.1:{port}", f"127.0.0.1:{other}" if services.with_fixed else None
    finally:
        for process in reversed(processes):
            stop(process)


def _draft_flags(services: ServedPair, pair: Path) -> list[str]:
    flags = [] if services.draft == "mtp" else ["--draft-model", str(pair / "draft")]  # MTP: in the target's folder
    if services.has_head:
        layers = state_layers(services.draft, pair)
        flags += ["--method", services.draft, "--set", f"target.hidden_state_layers={layers}"]
    return flags


def _size_flags(session: MeasuringSession, services: ServedPair) -> list[str]:
    flags = services.flags
    if session.is_tiny:
        where = [] if "--optimize" in flags or "--device" in flags else ["--device", "cpu"]
        return ["--max-model-len", "512", *("cpu" if flag.startswith("cuda") else flag for flag in flags), *where]
    pages = ["--set", f"target.num_pages={services.pages}", "--set", f"draft.num_pages={services.pages}"]
    return ["--dtype", "bfloat16", "--max-model-len", str(services.max_model_len), *flags, *pages]
