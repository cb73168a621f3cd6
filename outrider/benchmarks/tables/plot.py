"""Plot of README's comparison: tokens per second of one user against tokens per second of one GPU.

Writes SVG with the same bytes for the same results, so that the report can tell whether the file is fresh.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from outrider.benchmarks.schema import Result
from outrider.benchmarks.tables.comparison import System, compared_systems

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {"Outrider": "#1f77b4", "vLLM": "#d62728"}
_STABLE: dict[Any, Any] = {
    "svg.hashsalt": "outrider",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
}
"""Settings under which two runs write the same bytes."""


def plot(results: Sequence[Result]) -> str:
    """The plot as SVG; empty without results of the comparison.

    Needs matplotlib, which is in the extra ``dev``.
    """
    systems = compared_systems(results)
    if not systems:
        return ""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STABLE):
        figure = Figure(figsize=(8.4, 4.6), layout="constrained")
        axes = figure.add_subplot()
        for system in systems:
            _draw(axes, system)
        _label_users(axes, min(systems, key=_fastest_user), below=True)
        _label_users(axes, max(systems, key=_fastest_user))
        _label(axes)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def _draw(axes: Axes, system: System) -> None:
    colour = next(colour for engine, colour in _COLOURS.items() if system.name.startswith(engine))
    across, upward = zip(*((point.per_gpu, point.per_user) for point in system.points.values()), strict=True)
    axes.plot(across, upward, "o--" if system.is_plain else "o-", color=colour, label=system.name, markersize=4)


def _label_users(axes: Axes, system: System, *, below: bool = False) -> None:
    """Numbers of users beside the points of one line; the points of the others follow in the same order."""
    offset = (-2, -12) if below else (4, 4)
    for users, point in system.points.items():
        axes.annotate(str(users), (point.per_gpu, point.per_user), xytext=offset, textcoords="offset points", size=8)


def _fastest_user(system: System) -> float:
    return max(point.per_user for point in system.points.values())


def _label(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.set_xlabel("tokens per second of one GPU (all users)")
    axes.set_ylabel("tokens per second of one user")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.set_title("8B target, 1B draft, one H200; labels are numbers of users", size=10)
    axes.legend(frameon=False)
