"""One generation in figures: how fast, how much of the draft was kept, where the time went."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from outrider.generation import GenerationResult, SpeculationStats, Timing


def print_statistics(console: Console, result: GenerationResult) -> None:
    """A table of two columns."""
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in statistics(result):
        table.add_row(name, value, style="dim")
    console.print(table)


def statistics(result: GenerationResult) -> list[tuple[str, str]]:
    """(name, value with its unit)."""
    timing, stats = result.timing, result.speculation
    return [
        ("tokens", f"{result.usage.prompt_tokens} prompt, {result.usage.completion_tokens} output"),
        ("finished", f"{result.finish_reason.value}, seed {result.seed}"),
        ("time to first token", f"{1000 * timing.first_token:.1f} ms"),
        ("total", f"{1000 * timing.total:.1f} ms"),
        ("speed", _rate(tokens_per_second(result))),
        ("target passes", f"{stats.num_steps}"),
        ("acceptance rate", _share(acceptance_rate(stats))),
        ("mean acceptance length", f"{stats.mean_acceptance_length:.2f}" if stats.num_draft_tokens else "no data"),
        *([("drafted ahead", _ahead(timing.num_drafts_ahead, stats))] if timing.num_drafts_ahead else []),
        *([("forced by the grammar", _forced(stats))] if stats.num_forced_tokens else []),
        *([("grammar", _grammar(timing))] if timing.grammar else []),
        ("in draft", _by_phase(timing.draft, timing.prefill.draft)),
        ("in target", _by_phase(timing.target, timing.prefill.target)),
        ("in accept", _by_phase(timing.accept, timing.prefill.accept)),
        ("on the wire", _by_phase(timing.wire, timing.prefill.wire)),
    ]


def _ahead(count: int, stats: SpeculationStats) -> str:
    """Proposals that were begun before they were asked for, and the passes that had none."""
    with_drafts = sum(stats.acceptance_histogram)
    return f"{count} of {with_drafts} proposals, {stats.num_steps - with_drafts} passes without"


def _forced(stats: SpeculationStats) -> str:
    return f"{stats.num_forced_tokens} tokens proposed, {stats.num_accepted_forced_tokens} accepted"


def _grammar(timing: Timing) -> str:
    return f"compiled in {1000 * timing.grammar:.1f} ms, masks {1000 * timing.mask:.1f} ms beside forwards"


def tokens_per_second(result: GenerationResult) -> float | None:
    """Output tokens after the first, by the time after it; None where there is no second one."""
    seconds = result.timing.total - result.timing.first_token
    tokens = result.usage.completion_tokens - 1
    return tokens / seconds if tokens > 0 and seconds > 0 else None


def acceptance_rate(stats: SpeculationStats) -> float | None:
    """Accepted by drafted tokens, as vLLM counts."""
    return stats.num_accepted_tokens / stats.num_draft_tokens if stats.num_draft_tokens else None


def _rate(value: float | None) -> str:
    return "no data" if value is None else f"{value:.1f} tokens/s"


def _by_phase(total: float, prefill: float) -> str:
    """Seconds of a stage: in all, up to the first token, and after it."""
    return f"{1000 * total:.1f} ms (prefill {1000 * prefill:.1f}, decode {1000 * (total - prefill):.1f})"


def _share(value: float | None) -> str:
    return "no data" if value is None else f"{value:.2f}"
