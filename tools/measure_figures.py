"""Measure the figures that the project is judged by, part by part, on one or two GPUs.

    python tools/measure_figures.py OUT users heads        # two parts; without names all that the cards allow
    python tools/measure_figures.py OUT users --tiny       # tiny models on a CPU: does everything work?
    python tools/measure_figures.py --list

Writes OUT/benchmarks/results/*.json and OUT/logs. A part has a time limit of its own, and a row that fails leaves the
others alone. The table comes last. Pairs are synthetic; only vLLM's lies on the disk.
"""

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from outrider.benchmarks.schema import Result, load
from outrider.benchmarks.tables.cells import arms_of, best_fixed, median_of

ROOT = Path(__file__).parents[1]
app = typer.Typer(add_completion=False)


@dataclass(frozen=True, slots=True)
class Services:
    """A target, a draft and two coordinators on them, of chosen and of fixed draft lengths."""

    target: str = "8B"
    draft: str = "1B"
    """A shape, or a head: eagle3, mtp, dflash."""
    acceptance: float = 0.81
    flags: tuple[str, ...] = ()
    """Of ``outrider serve``."""
    with_fixed: bool = True
    pages: int = 12_000
    max_model_len: int = 12_288


@dataclass(frozen=True, slots=True)
class Row:
    """One load on services."""

    name: str
    services: Services
    users: int
    input_len: int = 128
    output_len: int = 256
    fixed: tuple[int, ...] = ()
    samplings: tuple[str, ...] = ()
    num_gpus: int | None = None
    wanted_ms: float | None = None
    """A token until all have finished, chosen: at most."""
    wanted_over_plain: float | None = None
    """Tokens/s, chosen over plain: at least."""
    wanted_over_best: float | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one table."""

    name: str
    about: str
    rows: tuple[Row, ...]
    num_cards: int = 1
    limit_s: int = 1200


_ALL_USERS = {1: 2.45, 8: 3.3, 32: 4.3, 64: 5.3, 128: 7.0, 256: 10.5}
_TWO_CARDS = {1: 2.0, 8: 2.7, 32: 3.4, 64: 3.9}
_FIXED = {0.5: (1, 3), 0.75: (2, 4), 0.9: (4, 8)}
_ARRANGEMENTS = {
    "apart": ("--device", "cuda:0", "--draft-device", "cuda:1"),
    "latency": ("--optimize", "latency"),
    "throughput": ("--optimize", "throughput"),
    "tp2": ("--device", "cuda:0", "--draft-device", "cuda:0", "--tensor-parallel-size", "2"),
}
_FOUR_DRAFT_TOKENS = ("--num-speculative-tokens", "4", "--set", "coordinator.draft_length=fixed")
"""So that a step is as long for sampled requests as for greedy ones."""
_SAMPLED = ('{"temperature": 0.6, "top_p": 0.9}', '{"temperature": 0.7, "top_p": 0.8, "top_k": 20}')


def _two_cards(name: str, flags: tuple[str, ...]) -> Part:
    services = Services(flags=flags, with_fixed=False)
    rows = tuple(
        Row(f"x2-{name}-users{users}", services, users, num_gpus=2, wanted_ms=wanted)
        for users, wanted in _TWO_CARDS.items()
    )
    return Part(name, f"two cards: {' '.join(flags)}", rows, num_cards=2)


def _shapes(target: str, draft: str, flags: tuple[str, ...] = ()) -> tuple[Row, ...]:
    services = Services(target, draft, flags=flags, max_model_len=4096)
    return tuple(Row(f"{target}-{draft}-users{users}".lower(), services, users, fixed=(3,)) for users in (1, 8, 32))


PARTS = (
    Part("users", "one card, chosen against plain and fixed lengths", tuple(
        Row(f"users{users}", Services(), users, fixed=(3, 5) if users <= 64 else (), wanted_ms=wanted)
        for users, wanted in _ALL_USERS.items()
    )),
    *(Part(f"acceptance{share:g}", f"acceptance {share:g}, users 1 to 128", tuple(
        Row(f"acceptance{share:g}-users{users}", Services(acceptance=share), users, fixed=lengths,
            wanted_over_plain=0.98, wanted_over_best=0.95)
        for users in (1, 8, 32, 128)
    )) for share, lengths in _FIXED.items()),
    Part("context4k", "64 users with 4,000 tokens each, the draft with a window", (
        Row("context4k-users64", Services(
            flags=("--set", "draft.attention_window=1024"), pages=19_000, with_fixed=False),
            64, input_len=4000, wanted_over_plain=1.5),
    )),
    Part("context16k", "8 users with 16,000 tokens each", (
        Row("context16k-users8", Services(max_model_len=20_000, with_fixed=False), 8, input_len=16_000,
            wanted_over_plain=0.98),
    )),
    Part("sampled", "sampled requests beside greedy ones, K = 4", (
        Row("sampled-users1", Services(flags=_FOUR_DRAFT_TOKENS, with_fixed=False), 1, samplings=_SAMPLED),
        Row("sampled-users32", Services(flags=_FOUR_DRAFT_TOKENS, with_fixed=False), 32, samplings=_SAMPLED),
    )),
    Part("first-token", "the first token of 8,000", (
        Row("first-token-8000", Services(with_fixed=False), 1, input_len=8000, output_len=4),
    )),
    *(Part(head, f"{head}, 1 and 32 users", (
        Row(f"{head}-users1", Services(draft=head, acceptance=0.8), 1, fixed=(5,),
            wanted_ms=1.9 if head == "eagle3" else None),
        Row(f"{head}-users32", Services(draft=head, acceptance=0.8), 32, fixed=(3,),
            wanted_over_plain=1.3 if head == "eagle3" else None),
    )) for head in ("eagle3", "mtp", "dflash")),
    Part("32b", "32B/0.6B on one card", _shapes("32B", "0.6B")),
    Part("70b", "70B/1B on two cards", _shapes("70B", "1B", _ARRANGEMENTS["tp2"]), num_cards=2),
    Part("coordinators", "256 users, two coordinators, fixed lengths", (
        Row("coordinators2-users256", Services(
            flags=("--num-coordinators", "2", "--set", "coordinator.draft_length=fixed"), with_fixed=False), 256),
    )),
    *(_two_cards(name, flags) for name, flags in _ARRANGEMENTS.items()),
)  # fmt: skip


@dataclass(slots=True)
class Session:
    """Where and how this run measures."""

    out: Path
    name: str
    is_tiny: bool
    environment: dict[str, str]
    deadline: float = 0.0
    failures: dict[str, str] = field(default_factory=dict)
    """By row: what went wrong."""

    @property
    def device(self) -> str:
        """Of the models."""
        return "cpu" if self.is_tiny else "cuda"

    def command(self, *words: str) -> list[str]:
        """Of this Python, without the folder it runs in."""
        return [sys.executable, "-P", *words]

    def run(self, command: list[str], log: str) -> None:
        """Wait for it until the part's time is up; ``RuntimeError`` with the log's last lines if it fails."""
        path = self.out / "logs" / f"{log}.log"
        with path.open("w") as written:
            process = self.start(command, written.fileno())
            try:
                code = process.wait(max(1.0, self.deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                code = -1
            finally:
                stop(process)
        if code:
            last = " / ".join(path.read_text(errors="replace").strip().splitlines()[-3:])
            raise RuntimeError(f"{'the part took too long' if code == -1 else f'exit {code}'}: {last}")

    def start(self, command: list[str], output: int) -> subprocess.Popen[bytes]:
        """A process in a group of its own, in the folder of the results."""
        return subprocess.Popen(
            command, cwd=self.out, env=self.environment, stdout=output, stderr=output, start_new_session=True
        )


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process, and all that it started and left behind."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _tiny(flags: tuple[str, ...]) -> tuple[str, ...]:
    return tuple("cpu" if flag.startswith("cuda") else flag for flag in flags)


def make_pair(session: Session, services: Services) -> Path:
    """Folder of the pair, made if it is not there."""
    is_head = services.draft in {"eagle3", "mtp", "dflash"}
    target, draft = services.target, services.draft
    if session.is_tiny:
        target, draft = "tiny", draft if is_head else "tiny-draft"
    folder = session.out / f"pair-{target}-{draft}-{services.acceptance:g}"
    if not (folder / "synthetic_pair.json").exists():
        made = [str(ROOT / "tools/make_synthetic_pair.py"), target, draft, "--out", str(folder), "--no-weights"]
        options = ["--acceptance", f"{services.acceptance:g}", "--device", session.device]
        session.run([sys.executable, *made, *options], folder.name)
    return folder


def state_layers(draft: str, pair: Path) -> str:
    """Layers that a head reads, so that graphs hand them out from the start."""
    from outrider.model_executor.draft_heads.config import read_eagle3_config
    from outrider.model_executor.draft_heads.dflash_config import read_dflash_config

    if draft == "mtp":
        return "-1"
    read = read_eagle3_config if draft == "eagle3" else read_dflash_config
    config: object = read(pair / "draft", pair / "target")
    return ",".join(map(str, getattr(config, "hidden_state_layers")))  # noqa: B009


@contextmanager
def serving(session: Session, services: Services, log: str) -> Iterator[tuple[str, str | None]]:
    """Addresses of the coordinators with chosen and with fixed lengths."""
    pair = make_pair(session, services)
    token = session.out / "link-token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(16))
    port, target, draft, other = (_free_port() for _ in range(4))
    command = ["-m", "outrider.cli", "serve", str(pair / "target"), "--load-format", "synthetic", "--no-http"]
    if services.draft != "mtp":  # which lies in the target's folder
        command += ["--draft-model", str(pair / "draft")]
    if services.draft in {"eagle3", "mtp", "dflash"}:
        layers = state_layers(services.draft, pair)
        command += ["--method", services.draft, "--set", f"target.hidden_state_layers={layers}"]
    if session.is_tiny:
        command += ["--max-model-len", "512", *_tiny(services.flags)]
        command += [] if "--optimize" in services.flags or "--device" in services.flags else ["--device", "cpu"]
    else:
        command += ["--dtype", "bfloat16", "--max-model-len", str(services.max_model_len), *services.flags]
        command += ["--set", f"target.num_pages={services.pages}", "--set", f"draft.num_pages={services.pages}"]
    command += ["--port", str(port), "--set", f"target.port={target}", "--set", f"draft.port={draft}"]
    for role in ("target", "draft", "coordinator"):
        command += ["--set", f"{role}.link_token_file={token}"]
    fixed = ["-m", "outrider_coordinator", "--port", str(other), "--target-address", f"127.0.0.1:{target}"]
    fixed += ["--draft-address", f"127.0.0.1:{draft}", "--link-token-file", str(token)]
    fixed += ["--draft-length", "fixed", "--num-speculative-tokens", "16"]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        processes.append(_started(session, command, f"{log}-serve", "is ready at"))
        if services.with_fixed:
            processes.append(_started(session, fixed, f"{log}-fixed", "the draft.* is attached"))
        yield f"127.0.0.1:{port}", f"127.0.0.1:{other}" if services.with_fixed else None
    finally:
        for process in reversed(processes):
            stop(process)


def _started(session: Session, command: list[str], log: str, ready: str) -> subprocess.Popen[bytes]:
    path = session.out / "logs" / f"{log}.log"
    with path.open("w") as written:
        process = session.start(session.command(*command), written.fileno())
    while not re.search(ready, path.read_text(errors="replace")):
        if process.poll() is not None or time.monotonic() > session.deadline:
            stop(process)
            raise RuntimeError(f"not started: {' / '.join(path.read_text(errors='replace').splitlines()[-3:])}")
        time.sleep(0.5)
    return process


def measure_row(session: Session, row: Row, addresses: tuple[str, str | None]) -> None:
    """One ``outrider bench serve``, whose result is saved under the row's name."""
    users, input_len, output_len = row.users, row.input_len, row.output_len
    if session.is_tiny:
        users, input_len, output_len = min(users, 2), min(input_len, 32), min(output_len, 16)
    chosen, fixed = addresses
    command = ["-m", "outrider.cli", "bench", "serve", "--address", chosen, "--baseline", "--device", session.device]
    command += ["--dtype", "float32" if session.is_tiny else "bfloat16", "--dataset-name", "random"]
    command += ["--runs", "1" if session.is_tiny else "3", "--num-warmups", str(users)]
    command += ["--num-prompts", str(max(users, 3)), "--max-concurrency", str(users)]
    command += ["--input-len", str(input_len), "--output-len", str(output_len)]
    command += ["--client-processes", str(min(users, 8)), "--save", f"{session.name}-{row.name}"]
    command += ["--num-gpus", str(row.num_gpus)] if row.num_gpus else []
    if fixed is not None and row.fixed:
        command += ["--fixed-address", fixed, *(word for k in row.fixed for word in ("--fixed-length", str(k)))]
    command += [word for sampling in row.samplings for word in ("--also-sampling", sampling)]
    session.run(session.command(*command), row.name)


def measure_part(session: Session, part: Part) -> None:
    """All rows; those that follow each other with the same services share them."""
    session.deadline = time.monotonic() + part.limit_s
    rows = list(part.rows)
    while rows:
        same = [row for row in rows if row.services == rows[0].services]
        rows = [row for row in rows if row.services != same[0].services]
        try:
            with serving(session, same[0].services, part.name) as addresses:
                for row in same:
                    try:
                        measure_row(session, row, addresses)
                        print(f"{row.name}: done", flush=True)
                    except RuntimeError as error:
                        session.failures[row.name] = str(error)
        except RuntimeError as error:
            session.failures.update({row.name: str(error) for row in same})


def line_of(row: Row, result: Result) -> str:
    """The row's figures, each with what is wanted of it."""
    until = [median_of(result, "until_all_finished", arm=arm) for arm in ("speculation", "baseline")]
    rates = [median_of(result, "output_throughput", arm=arm) for arm in ("speculation", "baseline")]
    first = median_of(result, "ttft", arm="speculation")
    best = best_fixed(result)
    over_plain = rates[0] / rates[1] if rates[0] and rates[1] else None
    over_best = rates[0] / max(best[1], rates[1] or 0.0) if rates[0] and best else None
    best_name = "" if best is None else f", best {best[0]} {best[1]:.0f} tok/s"
    steps = {name: median_of(result, "decode_total", arm=name) for name in arms_of(result) if name.startswith("T=")}
    alone = median_of(result, "decode_total", arm="speculation")
    sampled = "".join(f", {name} step over greedy's {taken / alone:.3f} (1.06)"
                      for name, taken in steps.items() if taken and alone)  # fmt: skip
    return (
        f"{row.name:<26} {_figure(until[0], row.wanted_ms, 2)} / {_figure(until[1], None, 2)} ms, "
        f"first {first or 0:.1f} ms, over plain {_figure(over_plain, row.wanted_over_plain, 3)}, "
        f"over best {_figure(over_best, row.wanted_over_best, 3)}{best_name}{sampled}"
    )


def _figure(value: float | None, wanted: float | None, digits: int) -> str:
    told = "-" if value is None else f"{value:.{digits}f}"
    return told if wanted is None else f"{told} ({wanted:g})"


def table(session: Session, parts: list[Part]) -> str:
    """A line for each row: chosen / plain; in brackets what is wanted."""
    lines = ["ms a token until all have finished, chosen / plain; wanted values in brackets"]
    for row in (row for part in parts for row in part.rows):
        path = session.out / "benchmarks/results" / f"{session.name}-{row.name}.json"
        failure = session.failures.get(row.name)
        lines.append(f"{row.name:<26} FAILED: {failure}" if failure else line_of(row, load(path)))
    return "\n".join(lines)


def environment_of(given: Mapping[str, str], num_cards: int, commit: str | None) -> dict[str, str]:
    """Of all processes: our packages, the cards, and the commit."""
    folders = [ROOT, *(ROOT / name for name in ("coordinator", "draft_service", "target_service"))]
    paths = os.pathsep.join([*map(str, folders), given.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    cards = given.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(num_cards)))
    chosen = ",".join(cards.split(",")[:num_cards])
    told = {"GIT_COMMIT": commit} if commit else {}
    return {**given, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": chosen, **told}


@app.command(help=__doc__)
def main(
    out: Annotated[Path, typer.Argument(help="Folder of results and logs.")] = Path("figures"),
    names: Annotated[list[str] | None, typer.Argument(metavar="[PART]...", help="Parts.")] = None,
    *,
    tiny: Annotated[bool, typer.Option(help="Tiny models on a CPU.")] = False,
    cards: Annotated[int, typer.Option(min=1, help="GPUs of this machine to use.")] = 1,
    gpu_name: Annotated[str, typer.Option(help="Beginning of the results' names.")] = "h200",
    commit: Annotated[str | None, typer.Option(help="Of the code, where the tree is no git checkout.")] = None,
    list_parts: Annotated[bool, typer.Option("--list", help="Only list the parts.")] = False,
) -> None:
    """Measure parts and print their table."""
    known = {part.name: part for part in PARTS}
    if list_parts:
        print("\n".join(f"{part.name:<14} {part.num_cards} card(s), {part.limit_s} s: {part.about}" for part in PARTS))
        return
    for name in names or ():
        if name not in known:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(known)}", param_hint="PART")
    chosen = [known[name] for name in names] if names else [part for part in PARTS if part.num_cards <= cards or tiny]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that services are stopped
    (out / "logs").mkdir(parents=True, exist_ok=True)
    session = Session(out.absolute(), "tiny" if tiny else gpu_name, tiny, {})
    for part in chosen:
        print(f"== {part.name}: {part.about}", flush=True)
        session.environment = environment_of(os.environ, part.num_cards, commit)
        measure_part(session, part)
    print(table(session, chosen))
    raise typer.Exit(1 if session.failures else 0)


if __name__ == "__main__":
    app()
