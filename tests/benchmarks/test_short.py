"""The lines that are read off a terminal: one for each figure, in columns, from the samples."""

import dataclasses

from outrider.benchmarks.schema import Series
from outrider.benchmarks.tables import TABLES
from outrider.benchmarks.tables.short import short_lines
from tests.benchmarks.test_schema import make_result


def test_every_kind_of_result_has_lines() -> None:
    from outrider.benchmarks.tables import short

    assert set(short._LINES) == set(TABLES)


def test_figures_stand_in_columns() -> None:
    labels: dict[str, str | int | float | bool] = {"batch_size": 1, "num_tokens": 5, "context": 64, "floor_ms": 2.0}
    engine = dataclasses.replace(
        make_result("one"), kind="engine", series=(Series("draft_loop", "ms", (2.0, 3.0, 7.0), labels),)
    )
    moments = (Series("between_forwards", "ms", (0.5, 0.7, 1.5), {"num_sessions": 32, "temperature": 0.0}),)
    step = dataclasses.replace(make_result("longer"), kind="step", series=moments)
    assert short_lines([engine, step]) == [
        "one     draft loop, 5 tokens, batch 1         3.000 ms, 1.50 times the floor",
        "longer  between forwards, 32 requests, T = 0  0.700 ms",
    ]
