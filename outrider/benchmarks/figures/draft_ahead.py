"""Compare what a draft computes ahead: the modes of `coordinator.draft_ahead`, in turn, on the same services.

An arm is ARRANGEMENT:MODE, or ARRANGEMENT:MODE:K with a fixed draft length, or ARRANGEMENT:MODE:K:RULE for temperature
1 under an acceptance method (greedy otherwise). Arrangements: apart (target on the first GPU, draft on the second), fp8
(the same with an FP8 draft), one (both models on the second GPU) and two (both models on each GPU, as two replicas).
Arms are coordinators of the same services, and take turns: each round plays every arm with every number of users once.
The table gives medians over rounds: milliseconds per token of a user (mean over streams), and the ratio to the first
arm of the same length and rule; tokens per second and GPU; steps ahead that were used and not used; direct proposals;
streams that leave those of the first arm, per 10,000 tokens. The pair is synthetic, of the shapes 8B and 1B.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import secrets
import statistics
import time
import urllib.request
from collections import defaultdict
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from outrider.benchmarks.figures.rows import ServedPair
from outrider.benchmarks.figures.services import link_token_file, make_pair
from outrider.benchmarks.figures.session import MeasuringSession, environment_of, stop
from outrider.benchmarks.serving.client_processes import ClientProcesses
from outrider.benchmarks.serving.figures import STAGES, measured_series
from outrider.benchmarks.serving.load import Decoding
from outrider.benchmarks.serving.records import Run
from outrider.benchmarks.serving.workload import Prompt, Traffic, random_prompts
from outrider.cli.stack.held_ports import hold_port
from outrider.client import AsyncClient
from outrider.config.fields import DraftAhead
from outrider.errors import ConfigError
from outrider.types import AcceptanceMethod

_DEVICES = {
    "apart": [("cuda:0", "cuda:1")],
    "fp8": [("cuda:0", "cuda:1")],
    "one": [("cuda:1", "cuda:1")],
    "two": [("cuda:0", "cuda:0"), ("cuda:1", "cuda:1")],
}
"""GPU of the target and of the draft, of each replica."""
_NUM_GPUS = 2
_COUNTED = {
    "used": r'outrider_lookahead_steps_total\{(?=[^}]*role="draft")[^}]*outcome="used"',
    "unused": r'outrider_lookahead_steps_total\{(?=[^}]*role="draft")[^}]*outcome="unused"',
    "direct": r"outrider_direct_proposals_total",
    "lost": r"outrider_sessions_lost_total",
    "failed": r"outrider_sessions_failed_total",
}
ServiceKey = tuple[str, str, str]
"""Role, GPU and quantization."""
_HAS_HTTP = importlib.util.find_spec("uvicorn") is not None


@dataclass(slots=True)
class AheadArm:
    """One coordinator."""

    arrangement: str
    mode: str
    length: int | None = None
    """Draft length of all requests; None: chosen."""
    rule: str | None = None
    """Acceptance method at temperature 1; None: greedy."""
    address: str = ""
    metrics: list[int] = field(default_factory=list)
    clients: ClientProcesses | None = None
    runs: dict[int, list[Run]] = field(default_factory=lambda: defaultdict(list))
    counts: dict[int, dict[str, float]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(float)))

    @property
    def name(self) -> str:
        """Name as in the flag."""
        parts = [self.arrangement, self.mode, "" if self.length is None else str(self.length), self.rule or ""]
        return ":".join(parts).rstrip(":")

    @property
    def num_gpus(self) -> int:
        """GPUs that it uses."""
        return len({device for pair in self.pairs for device in pair})

    @property
    def log(self) -> str:
        """Name of the coordinator's log."""
        return self.name.replace(":", "-")

    @property
    def services(self) -> list[tuple[ServiceKey, ServiceKey]]:
        """Target and draft of each replica."""
        quantization = "fp8" if self.arrangement == "fp8" else "none"
        return [(("target", first, "none"), ("draft", second, quantization)) for first, second in self.pairs]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """GPUs of target and draft of each replica."""
        return _DEVICES[self.arrangement]

    def counted(self) -> dict[str, float]:
        """Readings of the services' metrics now; none where they are not served."""
        texts = []
        for port in self.metrics:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                texts.append(answer.read().decode())
        return {name: _sum_of("\n".join(texts), start) for name, start in _COUNTED.items()} if texts else {}

    async def play(self, prompts: list[Prompt], decoding: Decoding) -> None:
        """One run, which is kept."""
        if self.clients is None:
            raise RuntimeError("the arm has no clients")
        before, users = self.counted(), len(prompts)
        temperature = 0.0 if self.rule is None else 1.0
        salted = replace(
            decoding, cache_salt=secrets.token_hex(8), temperature=temperature, acceptance_method=self.rule
        )
        run = await self.clients.run_load(prompts, Traffic(max_concurrency=users), salted)
        failed = [record.error for record in run.records if record.error]
        if failed:
            raise RuntimeError(f"{self.name}: {len(failed)} requests failed, the first with {failed[0]}")
        self.runs[users].append(run)
        for name, value in self.counted().items():
            self.counts[users][name] += value - before[name]


def _sum_of(text: str, start: str) -> float:
    found = re.findall(rf"^{start}[^ ]* (\S+)$", text, re.MULTILINE)
    return sum(float(value) for value in found)


def ms_per_token(run: Run) -> float:
    """Mean over streams of (last - first) / (tokens - 1)."""
    return 1e3 * statistics.fmean(found for record in run.completed if (found := record.time_per_output_token))


def divergences(arm: AheadArm, first: AheadArm, users: int) -> float:
    """Streams that leave those of the first arm, per 10,000 tokens: ties that 16 bits decide one way or the other."""
    pairs = [
        (own.result.token_ids, other.result.token_ids)
        for run, of_first in zip(arm.runs[users], first.runs[users], strict=False)
        for own, other in zip(run.records, of_first.records, strict=True)
        if own.result and other.result
    ]
    return 1e4 * sum(own != other for own, other in pairs) / sum(len(own) for own, _ in pairs)


def line_of(arm: AheadArm, first: AheadArm, users: int) -> str:
    """Figures of an arm with one number of users."""
    times = [ms_per_token(run) for run in arm.runs[users]]
    ratios = [own / ms_per_token(other) for own, other in zip(times, first.runs[users], strict=False)]
    until = statistics.median(1e3 * (run.time_per_token_until_all_finished or 0.0) for run in arm.runs[users])
    series = {each.name: each for each in measured_series(arm.runs[users], arm.name)}
    stages = "/".join(f"{statistics.fmean(series[f'decode_{stage}'].samples):.2f}" for stage in ("total", *STAGES))
    results = [record.result.speculation for run in arm.runs[users] for record in run.completed if record.result]
    steps = sum(found.num_steps for found in results)
    drafted, accepted = (
        sum(getattr(found, name) for found in results) / steps for name in ("num_draft_tokens", "num_accepted_tokens")
    )
    counts = " ".join(f"{name} {value / len(times):.0f}" for name, value in arm.counts[users].items())
    spread = f"{min(ratios):.3f}..{max(ratios):.3f}"
    return (
        f"{arm.name:<25} {users:>3} users {statistics.median(times):7.3f} ms ({until:6.3f}) "
        f"ratio {statistics.median(ratios):.3f} ({spread}) "
        f"tokens/s/GPU {1e3 * users / until / arm.num_gpus:.0f} K {drafted:.2f} acc {accepted:.2f} "
        f"step {stages} steps {steps / len(times):.0f} {counts} differ {divergences(arm, first, users):.1f}"
    )


def table(arms: list[AheadArm], users: list[int]) -> str:
    """All arms; steps in milliseconds: total and its stages."""
    firsts: dict[tuple[int | None, str | None], AheadArm] = {}
    for arm in arms:
        firsts.setdefault((arm.length, arm.rule), arm)
    heads = f"median of rounds; ms until all finished in brackets; step: total/{'/'.join(STAGES)}"
    played = [(arm, count) for count in users for arm in arms if arm.runs[count]]
    return "\n".join([heads, *(line_of(arm, firsts[arm.length, arm.rule], count) for arm, count in played)])


def parse_arm(text: str) -> AheadArm:
    """An arm from ARRANGEMENT:MODE:K:RULE; ``ConfigError`` for another form."""
    arrangement, mode, length, rule, *more = [*text.split(":"), "", "", ""]
    known: dict[str, list[str]] = {
        "ARRANGEMENT": list(_DEVICES),
        "MODE": list(DraftAhead),
        "RULE": ["", *AcceptanceMethod],
    }
    for name, given in (("ARRANGEMENT", arrangement), ("MODE", mode), ("RULE", rule)):
        if given not in known[name]:
            raise ConfigError("--arm", f"{text!r} should have the {name} {' or '.join(filter(None, known[name]))}")
    if any(more) or not (length == "" or (length.isdigit() and int(length) > 0)):
        raise ConfigError("--arm", f"{text!r} should be ARRANGEMENT:MODE:K:RULE, with a K of at least 1")
    return AheadArm(arrangement, mode, int(length) if length else None, rule or None)


def start(
    session: MeasuringSession, arms: list[AheadArm], settings: list[str], foreseen: float, stack: ExitStack
) -> None:
    """Start the services of all arrangements, and a coordinator for each arm."""
    services: dict[ServiceKey, dict[str, int]] = {}
    for arm in arms:
        for key in (key for pair in arm.services for key in pair):
            if key not in services:
                services[key] = _start_service(session, key, foreseen, stack)
    for arm in arms:
        _start_arm(session, services, arm, settings, stack)


def _start_service(session: MeasuringSession, key: ServiceKey, foreseen: float, stack: ExitStack) -> dict[str, int]:
    """Ports of a service, and of its metrics where they can be served."""
    role, device, quantization = key
    services = ServedPair(pages=4_000, max_model_len=4096, foreseen=foreseen)
    pair, found = make_pair(session, services), {"port": hold_port(), "metrics": hold_port()}
    sizes = ["--max-model-len", "512"]
    if not session.is_tiny:
        sizes = ["--dtype", "bfloat16", "--max-model-len", "4096", "--num-pages", str(services.pages)]
    command = ["-m", f"outrider_{role}", "--model", str(pair / role), "--load-format", "synthetic", *sizes]
    command += ["--port", str(found["port"]), "--device", "cpu" if session.is_tiny else device]
    command += ["--link-token-file", str(link_token_file(session)), "--quantization", quantization]
    command += ["--metrics-port", str(found["metrics"])] if _HAS_HTTP else []
    _start(session, command, f"{role}-{device.replace(':', '')}-{quantization}", stack)
    return found


def _start_arm(
    session: MeasuringSession,
    services: dict[ServiceKey, dict[str, int]],
    arm: AheadArm,
    settings: list[str],
    stack: ExitStack,
) -> None:
    port = hold_port()
    command = ["-m", "outrider_coordinator", "--port", str(port), "--link-token-file", str(link_token_file(session))]
    for role, keys in zip(("target", "draft"), zip(*arm.services, strict=True), strict=True):
        addresses = [f"127.0.0.1:{services[key]['port']}" for key in keys]
        command += [f"--{role}-address", ",".join(addresses)]
    if arm.length is not None:
        command += ["--draft-length", "fixed", "--num-speculative-tokens", str(arm.length)]
    _start(session, [*command, "--draft-ahead", arm.mode, *settings], arm.log, stack)
    arm.address = f"127.0.0.1:{port}"
    arm.metrics = [services[key]["metrics"] for pair in arm.services for key in pair] if _HAS_HTTP else []


def _start(session: MeasuringSession, words: list[str], log: str, stack: ExitStack) -> None:
    with session.log(log).open("w") as written:
        stack.callback(stop, session.start(session.command(*words), written.fileno()))


def wait_for_channel(session: MeasuringSession, arm: AheadArm) -> None:
    """Wait until proposals of the arm go directly; ``RuntimeError`` with the last lines of logs after too long."""
    awaited = len(arm.pairs)
    while session.log(arm.log).read_text(errors="replace").count("proposals go from") < awaited:
        if time.monotonic() > session.deadline:
            logs = sorted((session.out / "logs").glob("*.log"))
            told = [f"{log.name}: {' / '.join(log.read_text(errors='replace').splitlines()[-3:])}" for log in logs]
            raise RuntimeError("not started:\n" + "\n".join(told))
        time.sleep(0.2)


def run(
    out: Path,
    names: list[str],
    *,
    users: list[int],
    sampled_users: list[int] | None,
    foreseen: float,
    settings: list[str],
    output_len: int,
    rounds: int,
    start_s: float,
    limit_s: float,
    is_tiny: bool,
) -> None:
    """Start services and arms, play all arms and print the tables; logs come into ``out``."""
    began, arms = time.monotonic(), [parse_arm(name) for name in names]
    if not is_tiny and torch.cuda.device_count() < _NUM_GPUS:
        raise ConfigError("", "two GPUs are needed; --tiny plays tiny models on a CPU")
    (out / "logs").mkdir(parents=True, exist_ok=True)
    environment = environment_of(os.environ, _NUM_GPUS, None)
    session = MeasuringSession(out.absolute(), "ahead", is_tiny, environment, deadline=began + start_s)
    with ExitStack() as stack:
        start(session, arms, settings, foreseen, stack)
        for each in arms:
            wait_for_channel(session, each)
        print(f"started after {time.monotonic() - began:.0f} s", flush=True)
        asyncio.run(compare(arms, users, sampled_users or users, output_len, rounds, until=began + limit_s))


async def compare(
    arms: list[AheadArm], users: list[int], sampled: list[int], output_len: int, rounds: int, *, until: float
) -> None:
    """Play all arms in turn until all rounds are done, or the time is over; print the table after each round."""
    decoding, most = Decoding(max_tokens=output_len), max(users)
    async with AsyncExitStack() as stack:
        for arm in arms:
            arm.clients = await stack.enter_async_context(ClientProcesses(arm.address, min(most, 8)))
        async with AsyncClient(arms[0].address) as client:
            info = await client.model_info()
        for arm in arms:  # graphs, costs, acceptance
            for count in sorted({1, *(sampled if arm.rule else users)}):
                await arm.play(random_prompts(count, 128, info.num_token_ids, 1), decoding)
            arm.runs.clear()
            arm.counts.clear()
        for index in range(rounds):
            for count in users:
                prompts = random_prompts(count, 128, info.num_token_ids, 100 + index)
                for arm in arms[:: 1 if index % 2 else -1]:
                    if arm.rule is None or count in sampled:
                        await arm.play(prompts, decoding)
            print(f"round {index + 1} of {rounds}, {until - time.monotonic():.0f} s left", flush=True)
            print(table(arms, users), flush=True)
            if time.monotonic() > until:
                break
