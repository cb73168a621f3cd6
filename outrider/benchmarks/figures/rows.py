"""Rows of the tables: what is measured, on what, and which values are wanted. Plain data; ``parts`` fills it in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServedPair:
    """A target, a draft and two coordinators on them, of chosen and of fixed draft lengths."""

    target: str = "8B"
    draft: str = "1B"
    """A shape, or a head: eagle3, mtp, dflash."""
    acceptance: float = 0.81
    later_acceptance: float | None = None
    """Acceptance in the second half of the cycle that decoding walks, if it is another one."""
    foreseen: float = 0.0
    """Share of the other tokens that are the draft's second choice."""
    flags: tuple[str, ...] = ()
    """Flags of ``outrider serve``."""
    with_fixed: bool = True
    pages: int = 12_000
    max_model_len: int = 12_288

    @property
    def has_head(self) -> bool:
        """The draft reads the target's hidden states."""
        return self.draft in {"eagle3", "mtp", "dflash"}


@dataclass(frozen=True, slots=True)
class LoadRow:
    """One load on services."""

    name: str
    services: ServedPair
    users: int
    input_len: int = 128
    output_len: int = 256
    requests: int = 1
    """Requests of each user, one after the other: with several, prompts are computed while others decode."""
    fixed: tuple[int, ...] = ()
    sampling: str | None = None
    """Sampling of all requests, as JSON; None: greedy."""
    samplings: tuple[str, ...] = ()
    """Samplings of further arms, each as JSON."""
    num_gpus: int | None = None
    cached_prompts: bool = False
    """Prompts lie in the prefix cache: decoding alone is measured."""
    acceptance_falls: bool = False
    """Prompts end so that the later acceptance begins in the middle of the output."""
    wanted_ms: float | None = None
    """A token until all have finished, chosen: at most."""
    wanted_between_ms: float | None = None
    """Longest time of a decode step outside draft and target, with a chosen length."""
    wanted_over_plain: float | None = None
    """Tokens/s, chosen over plain: at least."""
    wanted_over_best: float | None = None


@dataclass(frozen=True, slots=True)
class ForwardComparison:
    """One forward of a result of ``outrider bench engine``, over another one or over its floor."""

    about: str
    labels: dict[str, int]
    over: dict[str, int] | None = None
    """None: over the floor, the larger of bytes and arithmetic at the measured rates."""
    is_long: bool = False
    """The first row of the forward has the longest context."""


@dataclass(frozen=True, slots=True)
class CommandRow:
    """One benchmark command that saves its results itself.

    ``{pair}``, ``{address}``, ``{device}`` and ``{dtype}`` in its words are replaced; ``{address}`` starts services.
    """

    name: str
    words: tuple[str, ...]
    """Words of ``outrider bench``, or a script of the checkout and its arguments."""
    full: tuple[str, ...] = ()
    """Further words of a real measurement."""
    tiny: tuple[str, ...] = ()
    """Flags in their place with tiny models."""
    services: ServedPair = ServedPair()
    comparisons: tuple[ForwardComparison, ...] = ()
    wanted: str = ""

    def reads(self, place: str) -> bool:
        """A word of a real measurement has this place to fill in."""
        return any(place in word for word in (*self.words, *self.full))


@dataclass(frozen=True, slots=True)
class PeerRow:
    """Another engine, measured by the command that ``--vllm`` names."""

    name: str
    services: ServedPair = ServedPair()
    """Services whose pair it may read."""


AnyRow = LoadRow | CommandRow | PeerRow


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one table."""

    name: str
    about: str
    rows: tuple[AnyRow, ...]
    num_cards: int = 1
    limit_s: int = 1200
