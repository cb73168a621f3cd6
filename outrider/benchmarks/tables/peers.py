"""Table of other engines: a row for each engine and number of users."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outrider.benchmarks.peers.engines import SPECULATIVE
from outrider.benchmarks.peers.run import tokens_per_gpu
from outrider.benchmarks.samples import ratio
from outrider.benchmarks.schema import Result
from outrider.benchmarks.tables.cells import Row, device, median_of, notes, number, pair, table

_EXPLAINED = (
    "K: draft tokens per step; TPOT: mean over streams of (last - first) / (tokens - 1), where an engine tells its "
    "streams' times, else as in brackets; until all finished: the whole time of the requests that go together by the "
    "tokens of one, prefill included, and in brackets less that of their first tokens, by the others; tok/s per user: "
    "1000 / TPOT; tok/s per GPU: users x 1000 / until all finished / GPUs; prompts that differ: those after which an "
    "engine says other tokens than the first one of its run."
)


@dataclass(frozen=True, slots=True)
class Measurement:
    """Medians of one engine with one number of users."""

    engine: str
    version: str
    num_speculative_tokens: int
    """0 without speculation."""
    num_users: int
    num_gpus: int | None
    """None on a CPU."""
    ttft_ms: float | None
    tpot_ms: float | None
    all_ms: float | None
    """A token until all have finished, prefill included."""
    after_first_ms: float | None
    """The same without the first token."""
    num_prompts: int
    num_different: int

    @property
    def system(self) -> str:
        """The engine that it is without speculation, with its version."""
        return self._versioned(SPECULATIVE.get(self.engine, self.engine))

    @property
    def versioned_engine(self) -> str:
        """The engine with its version."""
        return self._versioned(self.engine)

    def _versioned(self, name: str) -> str:
        """Less what names a build: 0.26.0+cu129 is 0.26.0."""
        return f"{name} {self.version.partition('+')[0]}".strip()

    @property
    def tokens_per_user(self) -> float | None:
        """Tokens a second of one user."""
        return ratio(1e3, self.tpot_ms)

    @property
    def tokens_per_gpu(self) -> float | None:
        """Tokens a second of all users, by the number of GPUs; None on a CPU."""
        return tokens_per_gpu(self.num_users, self.all_ms, self.num_gpus)


def measurements(result: Result) -> Iterable[Measurement]:
    """Measurements in the order in which they were taken."""
    for found in result.figures["prompts_that_differ"]:
        engine, num_users = found["engine"], found["num_users"]
        ttft, tpot, whole, after_first = (
            median_of(result, name, engine=engine, num_users=num_users)
            for name in ("ttft", "tpot", "until_all_finished", "after_first_tokens")
        )
        facts = result.configuration["engines"][engine]
        yield Measurement(
            engine=engine,
            version=facts["version"],
            num_speculative_tokens=facts["num_speculative_tokens"],
            num_users=num_users,
            num_gpus=facts["num_gpus"],
            ttft_ms=ttft,
            tpot_ms=tpot,
            all_ms=whole,
            after_first_ms=after_first,
            num_prompts=found["num_prompts"],
            num_different=found["num_different"],
        )


def peers_table(results: Sequence[Result]) -> str:
    """Other engines."""
    heads = ["run", "device", "pair", "engine", "K", "tokens in", "out", "users", "GPUs", "tok/s per user",
             "tok/s per GPU", "TTFT ms", "TPOT ms", "until all finished, ms", "prompts that differ"]  # fmt: skip
    rows = [_row(result, measured) for result in results for measured in measurements(result)]
    return table("Other engines", heads, rows, [_EXPLAINED, *notes(results)]) if rows else ""


def _row(result: Result, measured: Measurement) -> Row:
    facts = result.configuration
    return [
        f"`{result.name}`",
        device(result),
        pair(facts),
        measured.versioned_engine,
        str(measured.num_speculative_tokens),
        ", ".join(map(str, facts["input_lens"])),
        str(facts["output_len"]),
        str(measured.num_users),
        str(measured.num_gpus or ""),
        number(measured.tokens_per_user, 1),
        number(measured.tokens_per_gpu, 1),
        number(measured.ttft_ms, 1),
        number(measured.tpot_ms, 2),
        f"{number(measured.all_ms, 2)} ({number(measured.after_first_ms, 2)})",
        f"{measured.num_different}/{measured.num_prompts}",
    ]
