"""Plot of serving and of other engines: tokens a second of one user against tokens a second of one GPU.

Writes SVG, with the same bytes for the same results, so that the report can tell whether the file is fresh.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from outrider.benchmarks.schema import Result
from outrider.benchmarks.tables.cells import device, family, median_of
from outrider.benchmarks.tables.peers import measurements
from outrider.benchmarks.tables.serving import sampling, tokens_per_user

_WIDTH, _BOTTOM = 860, 412
"""Right edge of the picture and lower one of the axes; the legend is below."""
_LEFT, _RIGHT, _TOP = 64, 30, 34
_LEGEND_TOP, _LEGEND_LINE = 58, 16
_COLOURS = (
    "#1f77b4",
    "#d62728",
    "#2ca02c",
    "#9467bd",
    "#ff7f0e",
    "#17becf",
    "#8c564b",
    "#7f7f7f",
    "#e377c2",
    "#bcbd22",
    "#000000",
    "#1b2a6b",
    "#005f50",
    "#8a0f50",
    "#2d00ff",
    "#ffb900",
)
"""Of systems; more than these would share them."""
_FEWEST_POINTS = 3
"""Of a line; results of fewer numbers of users say nothing about the trade."""
_TICKS = (1, 2, 5)
_FINE_TICKS = (1, 1.5, 2, 2.5, 3, 4, 5, 7)
"""For an axis of less than a power of ten."""
_FEWEST_TICKS = 4

Point = tuple[float, float, int]
"""(tokens/s of one GPU, tokens/s of one user, users)."""


@dataclass(frozen=True, slots=True)
class Line:
    """One arm of one system over numbers of users."""

    name: str
    is_plain: bool
    """Without speculation: dashed, in the colour of the line with it."""
    points: tuple[Point, ...]
    peer: str = ""
    """Another engine, whose lines with and without speculation have names of their own; empty for Outrider."""

    @property
    def system(self) -> str:
        """Lines of one system have one colour."""
        return self.peer or self.name


def lines_of(results: Iterable[Result]) -> list[Line]:
    """Lines with enough points, from results of GPUs that name their number of users: Outrider's, then the peers'."""
    results = list(results)
    own, others = ([result for result in results if result.kind == kind] for kind in ("serve", "peers"))
    return [*_own_lines(own), *_peer_lines(others)]


def _own_lines(results: Sequence[Result]) -> Iterable[Line]:
    found: dict[tuple[str, bool], dict[int, Point]] = {}
    families = defaultdict[str, set[str]](set)
    for result in results:
        families[_name(result)].add(family(result))
    for result in results:
        users, gpus = result.configuration["traffic"]["max_concurrency"], _num_gpus(result.configuration)
        for arm in ("speculation", "baseline"):
            throughput, per_user = median_of(result, "output_throughput", arm=arm), tokens_per_user(result, arm)
            if users and gpus and throughput and per_user:
                name = _name(result)
                own = f"{name} ({family(result)})" if len(families[name]) > 1 else name
                key = (own, arm == "baseline")
                found.setdefault(key, {})[users] = (throughput / gpus, per_user, users)
    for (name, is_plain), points in sorted(found.items()):
        if len(points) >= _FEWEST_POINTS:
            yield Line(name, is_plain, _in_order(points))


def _peer_lines(results: Sequence[Result]) -> Iterable[Line]:
    """Lines of one peer, device and target share a colour: without speculation, and with the shortest drafts."""
    found: dict[tuple[str, str, str, int, str], dict[int, Point]] = {}
    for result in results:
        facts = result.configuration
        prompts = f"{'/'.join(map(str, facts['input_lens']))} in"
        for measured in measurements(result):
            gpus, of_gpu, per_user = measured.num_gpus, measured.tokens_per_gpu, measured.tokens_per_user
            if gpus and of_gpu and per_user and per_user > 0:
                system = f"{device(result)}: {measured.system}" + (f", {gpus} GPUs" if gpus > 1 else "")
                length, users = measured.num_speculative_tokens, measured.num_users
                key = (system, prompts, facts["target"], length, facts["pair"] if length else facts["target"])
                found.setdefault(key, {})[users] = (of_gpu, per_user, users)
    drawn = [(key, points) for key, points in sorted(found.items()) if len(points) >= _FEWEST_POINTS]
    alike = Counter((system, prompts, length) for (system, prompts, _, length, _), _ in drawn)
    shortest = {key[:3]: key for key, _ in reversed(drawn) if key[3]}
    for key, points in drawn:
        system, prompts, target, length, weights = key
        words = ", ".join(filter(None, [system, f"K={length}" if length else "", prompts]))
        name = f"{words} ({weights})" if alike[system, prompts, length] > 1 else words
        shares = not length or shortest[key[:3]] == key
        peer = f"{system}, {prompts} ({target})" if shares else name
        yield Line(name, not length, _in_order(points), peer)


def _in_order(points: Mapping[int, Point]) -> tuple[Point, ...]:
    return tuple(point for _, point in sorted(points.items()))


def _num_gpus(facts: Mapping[str, Any]) -> int | None:
    """GPUs of both models; None for results of CPUs. Older results do not name the number: one device is one GPU."""
    if "num_gpus" in facts:
        return int(facts["num_gpus"])
    return 1 if facts.get("device") == facts.get("draft_device") == "cuda" else None


def _name(result: Result) -> str:
    facts = result.configuration
    length = "" if facts.get("draft_length") == "auto" else f", K={facts['num_speculative_tokens']}"
    lengths = "/".join(map(str, facts["input_lens"]))
    temperature = sampling(facts["decoding"])
    sampled = "" if temperature == "0" else f", T={temperature}"
    num_gpus = _num_gpus(facts)
    placement = facts.get("placement") or ("one GPU" if num_gpus == 1 else f"{num_gpus} GPUs")
    return f"{device(result)}: {placement}, {lengths} in{length}{sampled}"


def plot(results: Iterable[Result]) -> str:
    """The plot as SVG; empty when no line has enough points."""
    lines = lines_of(results)
    if not lines:
        return ""
    across = _Axis([point[0] for line in lines for point in line.points], _LEFT, _WIDTH - _RIGHT)
    upward = _Axis([point[1] for line in lines for point in line.points], _BOTTOM, _TOP)
    systems = dict.fromkeys(line.system for line in lines)
    colours = {system: _COLOURS[i % len(_COLOURS)] for i, system in enumerate(systems)}
    named = {line.name: line for line in reversed(lines)}  # of two lines the one with speculation
    height = _BOTTOM + _LEGEND_TOP + _LEGEND_LINE * len(named)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        *_grid(across, upward, with_peers=any(line.peer for line in lines)),
    ]
    for line in lines:
        parts += _drawn(line, colours[line.system], across, upward)
    for place, line in enumerate(reversed(named.values())):
        parts += _legend(line, colours[line.system], _BOTTOM + _LEGEND_TOP + _LEGEND_LINE * place)
    return "\n".join([*parts, "</svg>", ""])


class _Axis:
    """A logarithmic axis from its smallest to its largest value, with ticks at 1, 2 and 5, or more if these are few."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        self._low, self._high = min(values) / 1.1, max(values) * 1.1
        self._start, self._end = start, end

    def at(self, value: float) -> float:
        share = math.log(value / self._low) / math.log(self._high / self._low)
        return round(self._start + share * (self._end - self._start), 1)

    @property
    def ticks(self) -> list[int]:
        coarse = self._ticks_at(_TICKS)
        return coarse if len(coarse) >= _FEWEST_TICKS else self._ticks_at(_FINE_TICKS)

    def _ticks_at(self, digits: Sequence[float]) -> list[int]:
        powers = range(math.floor(math.log10(self._low)), math.ceil(math.log10(self._high)) + 1)
        values = [digit * 10**power for power in powers for digit in digits]
        return [round(value) for value in values if self._low <= value <= self._high and value == round(value)]


def _grid(across: _Axis, upward: _Axis, *, with_peers: bool) -> list[str]:
    bottom, right = _BOTTOM, _WIDTH - _RIGHT
    parts = []
    for value in across.ticks:
        x = across.at(value)
        parts += [
            f'<line x1="{x}" y1="{_TOP}" x2="{x}" y2="{bottom}" stroke="#ddd"/>',
            f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{value:,}</text>',
        ]
    for value in upward.ticks:
        y = upward.at(value)
        parts += [
            f'<line x1="{_LEFT}" y1="{y}" x2="{right}" y2="{y}" stroke="#ddd"/>',
            f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{value:,}</text>',
        ]
    middle = (_LEFT + right) / 2
    squares = "; squares: other engines" if with_peers else ""
    return [
        *parts,
        f'<text x="{middle}" y="{bottom + 38}" text-anchor="middle">'
        f"tokens/s per GPU (numbers at points: users; dashed: without speculation{squares})</text>",
        f'<text x="{_LEFT}" y="{_TOP - 14}" text-anchor="middle">tokens/s per user</text>',
    ]


def _drawn(line: Line, colour: str, across: _Axis, upward: _Axis) -> list[str]:
    places = [(across.at(x), upward.at(y), users) for x, y, users in line.points]
    path = " ".join(f"{x},{y}" for x, y, _ in places)
    right, down, anchor = (6, -6, "start") if line.is_plain else (-6, 13, "end")
    return [
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{_dashes(line)}/>',
        *(_marker(line, x, y, colour) for x, y, _ in places),
        *(
            f'<text x="{x + right:.1f}" y="{y + down:.1f}" fill="{colour}" font-size="10" text-anchor="{anchor}">'
            f"{users}</text>"
            for x, y, users in places
        ),
    ]


def _dashes(line: Line) -> str:
    return ' stroke-dasharray="5 4"' if line.is_plain else ""


def _marker(line: Line, x: float, y: float, colour: str) -> str:
    if line.peer:
        return f'<rect x="{x - 3:.1f}" y="{y - 3:.1f}" width="6" height="6" fill="{colour}"/>'
    return f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>'


def _legend(line: Line, colour: str, y: int) -> list[str]:
    marker = [_marker(line, _LEFT + 11, y, colour)] if line.peer else []
    return [
        f'<line x1="{_LEFT}" y1="{y}" x2="{_LEFT + 22}" y2="{y}" stroke="{colour}" stroke-width="2"{_dashes(line)}/>',
        *marker,
        f'<text x="{_LEFT + 28}" y="{y + 4}" font-size="10">{escape(line.name)}</text>',
    ]
