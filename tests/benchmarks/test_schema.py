"""Results keep their samples, and no file can say what its samples do not."""

import dataclasses
import json
from pathlib import Path

import pytest

from outrider.benchmarks.environment import describe_environment, measured_commit, now
from outrider.benchmarks.samples import median, ratio, statistics_of
from outrider.benchmarks.schema import Label, Result, Series, from_json, load, save, summarized, to_json
from outrider.errors import ConfigError


def make_result(name: str = "made") -> Result:
    sizes: dict[str, Label] = {"over": "tcp", "num_bytes": 200, "reply_bytes": 16}
    return Result(
        kind="rpc",
        name=name,
        created_at=now(),
        environment=describe_environment("cpu"),
        configuration={"num_samples": 4},
        series=(
            Series(
                "round_trip",
                "ms",
                (1.0, 2.0, 3.0, 10.0),
                {"call": "unary", **sizes},
            ),
            Series("round_trip", "ms", (), {"call": "stream", **sizes}),
        ),
    )


def test_statistics_are_those_of_the_samples() -> None:
    found = statistics_of([1.0, 2.0, 3.0, 10.0])
    assert found is not None
    assert (found.count, found.mean, found.median, found.minimum, found.maximum) == (4, 4.0, 2.5, 1.0, 10.0)
    assert found.std == pytest.approx(12.5**0.5)
    assert found.p90 == pytest.approx(7.9)
    assert found.p99 == pytest.approx(9.79)
    assert statistics_of([]) is None
    assert median([]) is None
    assert (ratio(3.0, 2.0), ratio(None, 2.0), ratio(1.0, 0.0)) == (1.5, None, None)


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    result = make_result()
    assert load(save(result, tmp_path)) == result
    assert result.find("round_trip", call="stream") == result.series[1]
    assert result.find("round_trip", call="none") is None


def test_a_file_holds_statistics_for_its_readers(tmp_path: Path) -> None:
    content = json.loads(save(make_result(), tmp_path).read_text())
    assert content["series"][0]["statistics"]["median"] == 2.5
    assert content["series"][0]["samples"] == [1.0, 2.0, 3.0, 10.0]
    assert content["series"][1]["statistics"] is None


@pytest.mark.parametrize("statistic", ["median", "p99", "mean", "count"])
def test_a_figure_that_its_samples_do_not_give_is_refused(statistic: str) -> None:
    content = to_json(make_result())
    content["series"][0]["statistics"][statistic] *= 1.01
    with pytest.raises(ConfigError, match=statistic):
        from_json(content)


def make_long_result() -> Result:
    series = Series("ttft", "ms", tuple(float(value * value % 97) for value in range(64)), {"arm": "speculation"})
    others = [dataclasses.replace(series, labels={"arm": "K=3"}), dataclasses.replace(series, name="e2el")]
    figures = {"speculation": {"median_ttft_ms": 1.0, "completed": 64}}
    return dataclasses.replace(make_result("long"), kind="serve", series=(series, *others), figures=figures)


def test_a_summary_keeps_the_statistics_of_all_samples(tmp_path: Path) -> None:
    whole = make_long_result()
    summary = load(save(summarized(whole), tmp_path))
    assert [(series.name, series.labels, series.samples) for series in summary.series] == [
        ("ttft", {"arm": "speculation"}, ())
    ]
    before, after = whole.series[0].statistics, summary.series[0].statistics
    assert before is not None and after is not None
    assert (after.count, after.median) == (64, summary.series[0].median)
    assert (after.mean, after.median, after.p99) == pytest.approx((before.mean, before.median, before.p99), rel=1e-5)
    assert summary.figures == {"speculation": {"completed": 64}}
    assert to_json(summarized(summary)) == to_json(summary)


def test_results_whose_samples_belong_together_are_not_summarized() -> None:
    result = dataclasses.replace(make_long_result(), kind="tracing")
    assert summarized(result) == result


def test_a_summary_of_another_length_is_refused() -> None:
    content = to_json(summarized(make_long_result()))
    content["series"][0].append(1.0)
    with pytest.raises(ConfigError, match="no benchmark result"):
        from_json(content)


def test_committed_results_stay_small() -> None:
    folder = Path(__file__).parents[2] / "benchmarks/results"
    assert sum(path.stat().st_size for path in folder.iterdir()) < 300_000


def test_other_files_are_refused_by_name(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"schema_version": 99}')
    with pytest.raises(ConfigError, match=r"other\.json.*must be 1"):
        load(other)
    other.write_text("no json")
    with pytest.raises(ConfigError, match=r"other\.json"):
        load(other)
    save(make_result("one"), tmp_path).rename(tmp_path / "two.json")
    with pytest.raises(ConfigError, match="holds the result 'one'"):
        load(tmp_path / "two.json")


def test_the_environment_names_code_and_machine_but_no_place() -> None:
    environment = describe_environment("cpu")
    assert environment.num_cpus >= 1
    assert {"python", "numpy", "grpcio"} <= environment.versions.keys()
    assert str(Path.home()) not in json.dumps(to_json(make_result()))
    assert environment.commit == "" or len(environment.commit) == 40


def test_a_copy_without_git_is_told_its_commit() -> None:
    assert measured_commit({"GIT_COMMIT": "a" * 40}) == ("a" * 40, False)
    assert measured_commit({"GIT_COMMIT": f"{'a' * 40}-dirty"}) == ("a" * 40, True)
