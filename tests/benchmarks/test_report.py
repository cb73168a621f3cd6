"""Tables come from result files alone, and a stale one is found."""

import dataclasses
import json
from pathlib import Path

import pytest

from outrider.benchmarks.report import BEGIN, END, _when, main
from outrider.benchmarks.schema import Result, Series, load, save
from outrider.benchmarks.tables import render
from outrider.benchmarks.tables.cells import commit
from tests.benchmarks.test_schema import make_result


def engine_result(name: str, *, synthetic: bool) -> Result:
    labels: dict[str, str | int | float | bool] = {"batch_size": 1, "num_tokens": 5, "context": 64, "floor_ms": 2.0}
    return dataclasses.replace(
        make_result(name),
        kind="engine",
        configuration={"model": "some", "dtype": "float32", "synthetic": synthetic},
        series=(Series("forward", "ms", (2.0, 3.0, 7.0), labels), Series("copy_bandwidth", "GB/s", (9.0,))),
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    save(make_result("wire"), tmp_path / "benchmarks/results")
    (tmp_path / "README.md").write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    return tmp_path


def test_tables_hold_medians_of_the_samples() -> None:
    text = render([engine_result("one", synthetic=False), make_result()])
    assert "| forward | 1 | 5 | 64 | 3.000 | 2.000 | 1.50 |" in text
    assert "| unary |" in text
    assert "2.500 | 9.790 |" in text
    assert "ynthetic" not in text


def test_a_synthetic_pair_is_said_to_be_one() -> None:
    text = render([engine_result("one", synthetic=True)])
    assert "some float32 \\*" in text
    assert "random weights" in text


def test_noise_for_weights_is_said_to_be_that() -> None:
    result = engine_result("one", synthetic=False)
    text = render([dataclasses.replace(result, configuration={**result.configuration, "load_format": "dummy"})])
    assert "some float32 †" in text
    assert "† Random weights (" in text


def test_a_step_without_its_forwards_has_a_table() -> None:
    labels: dict[str, str | int | float | bool] = {"num_sessions": 32, "temperature": 0.0, "over": "tcp"}
    series = (
        Series("between_forwards", "ms", (0.5, 0.7, 1.5), labels),
        Series("coordinator_processor", "ms", (0.25,), labels),
    )
    text = render([dataclasses.replace(make_result("some"), kind="step", series=series)])
    assert "| tcp | 32 | 0 | 0.700 | 1.484 | 0.250 |" in text


def test_every_result_says_which_code_it_speaks_of(root: Path) -> None:
    unknown = dataclasses.replace(make_result().environment, commit="")
    save(dataclasses.replace(make_result("copied"), environment=unknown), root / "benchmarks/results")
    assert main(["--root", str(root)]) == 0
    known = load(root / "benchmarks/results/wire.json").environment
    rows = (root / "benchmarks/results/README.md").read_text().partition("**What was run**")[2].splitlines()
    assert [row.split("|")[3].strip() for row in rows if row.startswith("| `")] == ["not recorded", commit(known)]


def test_results_of_code_that_was_not_committed_are_named_beside_the_tables() -> None:
    results = []
    for name, is_changed in (("first", False), ("second", True)):
        made = dataclasses.replace(make_result(name), kind="serve")
        environment = dataclasses.replace(made.environment, has_local_changes=is_changed)
        results.append(dataclasses.replace(made, environment=environment))
    assert _when(results[:1]).endswith("; each file names its commit.\n")
    assert _when(results).endswith(" its commit (`second`: with changes that were not committed).\n")


def test_a_result_that_no_table_would_show_is_refused(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(dataclasses.replace(make_result("odd"), kind="guess"), root / "benchmarks/results")
    assert main(["--check", "--root", str(root)]) == 1
    assert "odd.json: is of kind 'guess'" in capsys.readouterr().err


def test_without_results_nothing_is_claimed(tmp_path: Path) -> None:
    assert main(["--root", str(tmp_path)]) == 0
    assert "No results" in (tmp_path / "benchmarks/results/README.md").read_text()


def test_writing_makes_it_fresh_and_a_new_result_makes_it_stale(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check", "--root", str(root)]) == 1
    assert "README.md is stale" in capsys.readouterr().err
    assert main(["--root", str(root)]) == 0
    assert main(["--check", "--root", str(root)]) == 0
    text = (root / "README.md").read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "`wire`" not in text, "what no user feels stays beside the results"
    assert "`wire`" in (root / "benchmarks/results/README.md").read_text()
    save(make_result("wire2"), root / "benchmarks/results")
    assert main(["--check", "--root", str(root)]) == 1


def test_a_result_that_was_tampered_with_stops_the_report(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = root / "benchmarks/results/wire.json"
    content = json.loads(path.read_text())
    content["series"][0]["statistics"]["median"] = 0.1
    path.write_text(json.dumps(content))
    assert main(["--root", str(root)]) == 1
    assert "wire.json" in capsys.readouterr().err


def test_a_mark_without_its_end_is_an_error(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "README.md").write_text(f"before\n{BEGIN}\nold\n")
    assert main(["--root", str(root)]) == 1
    assert "README.md" in capsys.readouterr().err


def test_the_committed_tables_are_fresh() -> None:
    assert main(["--check", "--root", str(Path(__file__).parents[2])]) == 0


def test_new_results_replace_those_of_their_name_and_everything_follows(root: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    results = run / "benchmarks/results"
    save(dataclasses.replace(make_result("wire"), created_at="2031-02-03T00:00:00+00:00"), results)
    save(engine_result("more", synthetic=False), results)
    assert main(["--root", str(root), "--add", str(run)]) == 0
    assert load(root / "benchmarks/results/wire.json").created_at.startswith("2031-02-03")
    assert "`more`" in (root / "benchmarks/results/README.md").read_text()
    assert main(["--root", str(root), "--check"]) == 0


def test_nothing_is_taken_in_unless_all_of_it_can_be_shown(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    save(make_result("fine"), run)
    save(dataclasses.replace(make_result("odd"), kind="guess"), run)
    assert main(["--root", str(root), "--add", str(run)]) == 1
    assert not (root / "benchmarks/results/fine.json").exists()
    assert main(["--root", str(root), "--add", str(tmp_path / "none")]) == 1
    assert "has no results" in capsys.readouterr().err


def test_rows_are_in_the_order_of_the_numbers_in_their_names(root: Path) -> None:
    for users in (128, 8, 32):
        save(make_result(f"users{users}"), root / "benchmarks/results")
    assert main(["--root", str(root)]) == 0
    text = (root / "benchmarks/results/README.md").read_text().partition("**What was run**")[2]
    assert text.index("users8`") < text.index("users32`") < text.index("users128`")
