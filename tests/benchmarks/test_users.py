"""Tables of serving: one for each arrangement of the models, a row for each number of users."""

import dataclasses

from outrider.benchmarks.schema import Result, Series
from outrider.benchmarks.tables import TABLES
from outrider.benchmarks.tables.short import short_lines
from outrider.benchmarks.tables.users import user_tables
from tests.benchmarks.made_results import serve_result
from tests.benchmarks.test_schema import make_result


def test_each_arrangement_has_a_table_of_its_own_with_a_row_for_each_number_of_users() -> None:
    text = user_tables([serve_result(1), serve_result(8), serve_result(4, num_gpus=3)])
    two, three = text.split("**2 x ")[1].split("**3 x ")
    assert two.partition("\n")[0].endswith(
        ", target on 1 GPU, draft on 1 more, a / b, up to 8 draft tokens** (`users*`)"
    )
    assert "| 1 | 0 | 128 | 400 / 200 | 200 / 100 |" in two
    assert "| 8 | 0 | 128 | 400 / 200 | 1600 / 800 |" in two
    assert "| 4 | 0 | 128 |" in three
    assert "(`users4`)" in three
    assert "Speedup: the median over pairs of runs" in text
    assert not user_tables([])


def test_two_drafts_of_one_arrangement_have_a_table_each() -> None:
    names = ("8b-1b", "8b-eagle3")
    results = [
        dataclasses.replace(serve_result(users), name=f"{name}-users{users}") for name in names for users in (1, 8, 32)
    ]
    text = user_tables(results)
    assert text.count("**2 x ") == 2
    assert "(`8b-1b-users*`)" in text and "(`8b-eagle3-users*`)" in text


def test_older_synthetic_pairs_of_one_family_share_a_table_whatever_their_roles_were_called() -> None:
    def older(users: int, pair: str) -> Result:
        result = serve_result(users)
        configuration = {**result.configuration, "pair": pair, "synthetic": True}
        return dataclasses.replace(result, name=f"8b-eagle3-users{users}", configuration=configuration)

    without_mark, with_mark = "target (synthetic) / draft", "target (synthetic) / draft (synthetic)"
    text = user_tables([older(1, with_mark), older(8, without_mark), older(32, with_mark)])
    (title, *rest) = text.split("**2 x ")[1:]
    assert not rest and ", synthetic pair \\*, up to" in title
    assert [row.split()[1] for row in title.splitlines() if row.endswith("|")] == ["users", "---", "1", "8", "32"]
    named = user_tables([older(1, "8B (synthetic) / eagle3 (synthetic)"), older(8, without_mark)])
    assert ", 8B (synthetic) / eagle3 (synthetic) \\*, up to" in named and named.count("**2 x ") == 2


def test_single_results_of_one_arrangement_share_a_table_and_are_named() -> None:
    names = ("8b-users1", "8b-users8", "context4k-users64", "arrivals128-users16")
    results = [dataclasses.replace(serve_result(index + 1), name=name) for index, name in enumerate(names)]
    text = user_tables(results)
    family, singles = text.split("**2 x ")[1:]
    assert "(`8b-users*`)" in family and "context4k" not in family
    assert singles.partition("\n")[0].endswith(" draft tokens**")
    assert "| result | users |" in singles
    assert "| `context4k-users64` | 3 | 0 | 128 |" in singles and "| `arrivals128-users16` | 4 | 0 | 128 |" in singles
    alone = user_tables(results[:3])
    assert "(`context4k-users64`)" in alone and "| result |" not in alone


def test_other_samplings_have_rows_of_their_own() -> None:
    result, arm = serve_result(8), "T=0.6 p=0.9 k=0"
    mine = [series for series in result.series if series.labels.get("arm") == "speculation"]
    sampled = [dataclasses.replace(series, labels={**series.labels, "arm": arm}) for series in mine]
    figures = {**result.figures, arm: result.figures["speculation"]}
    text = user_tables([dataclasses.replace(result, series=(*result.series, *sampled), figures=figures)])
    assert "| 8 | 0 | 128 | 400 / 200 | 1600 / 800 |" in text
    assert "| 8 | 0.6, top-p 0.9 | 128 | 400 | 1600 |  |" in text


def test_every_kind_of_result_has_lines() -> None:
    from outrider.benchmarks.tables import short

    assert set(short.LINES) == set(TABLES)


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
