"""Coverage of CUDA graphs: which forwards that the settings allow have a graph, and which are launched without one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from outrider.kernels.paged_attention.device_plan import MAX_DECODE_QUERIES
from outrider.model_executor.device_inputs import BatchShape
from outrider.model_executor.graph_shapes import GraphLimits


@dataclass(frozen=True, slots=True)
class ScoringCoverage:
    """Forwards in which every sequence has as many draft tokens; 0 is plain decoding."""

    draft_length: int
    num_sequences: int
    """Largest number of sequences that fit a graph."""
    num_possible: int
    """Largest number of sequences that the limits let into one forward."""

    @property
    def is_whole(self) -> bool:
        """True if every such forward has a graph."""
        return self.num_sequences >= self.num_possible


def scoring_coverage(limits: GraphLimits, shapes: Sequence[BatchShape]) -> list[ScoringCoverage]:
    """Coverage by draft length, from 0 on. A shape that holds this many sequences holds fewer too."""
    found = []
    for draft_length in range(limits.max_draft_length + 1):
        queries = draft_length + 1
        fitting = (min(shape.num_rows, shape.num_tokens // queries) for shape in shapes if shape.max_queries >= queries)
        possible = min(limits.max_sequences, max(1, limits.forward_tokens // queries))
        found.append(ScoringCoverage(draft_length, max(fitting, default=0), possible))
    return found


def prompt_coverage(limits: GraphLimits, shapes: Sequence[BatchShape]) -> tuple[int, int]:
    """Tokens and sequences up to which a forward with a chunk of a prompt has a graph, whatever the chunk."""
    chunks = [shape for shape in shapes if shape.max_queries > MAX_DECODE_QUERIES]
    tokens = max((shape.num_tokens for shape in chunks), default=0)
    rows = max((shape.num_rows for shape in chunks if shape.num_tokens == tokens), default=0)
    return tokens, rows


def describe_coverage(limits: GraphLimits, shapes: Sequence[BatchShape]) -> str:
    """One line: what has a graph, and what has none."""
    scoring = scoring_coverage(limits, shapes) if limits.decodes else []
    tokens, rows = prompt_coverage(limits, shapes)
    covered = [*_covered_scoring(limits, scoring), *([f"prompts in up to {tokens} tokens"] if tokens else [])]
    missing = [*_missing_scoring(scoring), *_missing_prompts(limits, tokens, rows)]
    missing.append(f"more than {limits.max_sequences} sequences")
    return f"with a graph: {', '.join(covered) or 'nothing'}; without: {', '.join(missing)}"


def _covered_scoring(limits: GraphLimits, scoring: Sequence[ScoringCoverage]) -> Iterator[str]:
    if whole := [one.draft_length for one in scoring if one.is_whole]:
        yield f"up to {limits.max_sequences} sequences with {_runs(whole)} draft tokens"


def _missing_scoring(scoring: Sequence[ScoringCoverage]) -> Iterator[str]:
    if missing := [one for one in scoring if not one.is_whole]:
        lengths = _runs([one.draft_length for one in missing])
        bounds = _span([one.num_sequences for one in missing])  # fewer for longer drafts
        yield f"{lengths} draft tokens for more than {bounds} sequences"


def _missing_prompts(limits: GraphLimits, tokens: int, rows: int) -> Iterator[str]:
    if tokens < limits.forward_tokens:
        yield f"prompts in more than {tokens} tokens"
    if 0 < rows < min(limits.max_sequences, tokens):
        yield f"prompts beside more than {rows} sequences"


def _runs(numbers: Sequence[int]) -> str:
    """Ascending numbers in words, neighbours together: "0 to 3, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(_span(run) for run in runs)


def _span(numbers: Sequence[int]) -> str:
    first, last = numbers[0], numbers[-1]
    return str(first) if first == last else f"{first} to {last}"
