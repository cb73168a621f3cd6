"""The plot shows lines of enough points, and changes with the figures alone."""

import dataclasses
import xml.etree.ElementTree as ET
from pathlib import Path

from outrider.benchmarks.peers.engines import Pair
from outrider.benchmarks.peers.run import Load, Outcome, Plan, to_result
from outrider.benchmarks.report import BEGIN, END, main
from outrider.benchmarks.schema import RESULTS, Result, Series, load, save
from outrider.benchmarks.tables import plot as plotting
from outrider.benchmarks.tables.cells import device
from outrider.benchmarks.tables.plot import lines_of, plot
from outrider.benchmarks.tables.users import user_tables
from tests.benchmarks.test_schema import make_result


def serve_result(users: int, *, num_gpus: int = 2) -> Result:
    configuration = {
        "pair": "a / b",
        "traffic": {"max_concurrency": users},
        "decoding": {"temperature": 0.0, "top_p": 1.0, "top_k": 0},
        "input_lens": [128],
        "num_speculative_tokens": 8,
        "draft_length": "auto",
        "placement": "target on 1 GPU, draft on 1 more",
        "num_gpus": num_gpus,
    }
    series = tuple(
        item
        for arm, faster in (("speculation", 2.0), ("baseline", 1.0))
        for item in (
            Series("tpot", "ms", (4.0 / faster, 6.0 / faster), {"arm": arm}),
            Series("output_throughput", "tok/s", (faster * 200.0 * users,), {"arm": arm}),
        )
    )
    figures: dict[str, dict[str, float]] = {"speculation": {}, "baseline": {}}
    return dataclasses.replace(
        make_result(f"users{users}"), kind="serve", configuration=configuration, series=series, figures=figures
    )


def peer_result(users: tuple[int, ...], *, length: int = 3, pair: str = "8b-1b", device: str = "cuda") -> Result:
    names = ("vllm", "vllm-speculative")
    prompt = (0,) * 128
    plan = Plan(
        names,
        Pair("a", "b", device, "bfloat16", length, 512),
        tuple(Load(count, ((prompt,) * count,)) for count in users),
    )
    outcomes = [
        Outcome(name, (ms,), (1.0,), ((1,),) * count, (2 * ms,), count, "0.26.0+cu129")
        for name, ms in zip(names, (8.0, 4.0), strict=True)
        for count in users
    ]
    facts = {"pair": pair, "target": f"{pair} target", "synthetic": True}
    result = to_result(outcomes, plan, name=f"vllm-{pair}-k{length}-{users[0]}", configuration=facts)
    return dataclasses.replace(result, environment=make_result("some").environment)


def test_points_are_per_gpu_and_from_the_mean_over_streams() -> None:
    speculation, plain = lines_of([serve_result(users) for users in (8, 1, 32)])
    assert speculation.points == ((200.0, 400.0, 1), (1600.0, 400.0, 8), (6400.0, 400.0, 32))
    assert plain.is_plain
    assert plain.points[0] == (100.0, 200.0, 1)


def test_a_line_needs_three_numbers_of_users_and_gpus() -> None:
    assert lines_of([serve_result(users) for users in (1, 8)]) == []
    assert plot([serve_result(users, num_gpus=0) for users in (1, 8, 32)]) == ""


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


def test_two_drafts_of_one_arrangement_have_a_line_and_a_table_each() -> None:
    names = ("8b-1b", "8b-eagle3")
    results = [
        dataclasses.replace(serve_result(users), name=f"{name}-users{users}") for name in names for users in (1, 8, 32)
    ]
    assert [line.name.rpartition(" ")[2] for line in lines_of(results)] == [
        "(8b-1b)", "(8b-1b)", "(8b-eagle3)", "(8b-eagle3)"
    ]  # fmt: skip
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


def test_the_plot_is_a_file_that_the_report_keeps_fresh(tmp_path: Path) -> None:
    for users in (1, 8, 32):
        save(serve_result(users), tmp_path / "benchmarks/results")
    (tmp_path / "README.md").write_text(f"{BEGIN}\n{END}\n")
    assert main(["--root", str(tmp_path)]) == 0
    drawn = tmp_path / "benchmarks/results/throughput.svg"
    assert len(ET.fromstring(drawn.read_text()).findall("{*}polyline")) == 2
    assert "(benchmarks/results/throughput.svg)" in (tmp_path / "README.md").read_text()
    assert main(["--check", "--root", str(tmp_path)]) == 0
    drawn.write_text("old")
    assert main(["--check", "--root", str(tmp_path)]) == 1


def test_older_results_of_one_device_are_of_one_gpu() -> None:
    def older(users: int, draft_device: str) -> Result:
        result = serve_result(users)
        facts = {k: v for k, v in result.configuration.items() if k not in ("num_gpus", "placement")}
        return dataclasses.replace(result, configuration={**facts, "device": "cuda", "draft_device": draft_device})

    lines = lines_of([older(users, "cuda") for users in (1, 8, 32)])
    assert {line.name for line in lines} == {f"{device(serve_result(1))}: one GPU, 128 in"}
    assert lines_of([older(users, "cuda:1") for users in (1, 8, 32)]) == []


def test_a_plot_that_stands_above_is_not_shown_twice(tmp_path: Path) -> None:
    for users in (1, 8, 32):
        save(serve_result(users), tmp_path / "benchmarks/results")
    readme = tmp_path / "README.md"
    readme.write_text(f"![tokens](benchmarks/results/throughput.svg)\n{BEGIN}\n{END}\n")
    assert main(["--root", str(tmp_path)]) == 0
    assert readme.read_text().count("throughput.svg") == 1


def test_a_peer_has_a_plain_line_and_one_with_drafts_in_one_colour() -> None:
    card = device(serve_result(1))
    plain, drafted = lines_of([peer_result((1, 8)), peer_result((32,))])
    assert (plain.name, plain.is_plain) == (f"{card}: vllm 0.26.0, 128 in", True)
    assert (drafted.name, drafted.is_plain) == (f"{card}: vllm 0.26.0, K=3, 128 in", False)
    assert plain.system == drafted.system
    assert drafted.points == ((125.0, 250.0, 1), (1000.0, 250.0, 8), (4000.0, 250.0, 32))
    assert lines_of([peer_result((1, 8))]) == []
    assert lines_of([peer_result((1, 8, 32), device="cpu")]) == []


def test_other_lengths_and_targets_of_a_peer_have_lines_of_their_own() -> None:
    lengths = lines_of([peer_result((1, 8, 32), length=length) for length in (5, 3)])
    assert [line.name.partition(": ")[2] for line in lengths] == [
        f"vllm 0.26.0, {words}128 in" for words in ("", "K=3, ", "K=5, ")
    ]
    assert lengths[0].system == lengths[1].system != lengths[2].system
    pairs = lines_of([peer_result((1, 8, 32), pair=pair) for pair in ("8b-1b", "32b-1b")])
    assert [line.name.partition(" in ")[2] for line in pairs] == [
        "(32b-1b target)", "(32b-1b)", "(8b-1b target)", "(8b-1b)"
    ]  # fmt: skip
    assert len({line.system for line in pairs}) == 2


def test_peers_are_squares_beside_circles_and_stand_in_the_legend() -> None:
    ours = [serve_result(users) for users in (1, 8, 32)]
    drawn, alone = (ET.fromstring(plot(results)) for results in ([*ours, peer_result((1, 8, 32))], ours))
    assert len(drawn.findall("{*}circle")) == len(alone.findall("{*}circle")) == 6
    squares = [item for item in drawn.findall("{*}rect") if item.get("width") == "6"]
    assert len(squares) == 6 + 2, "points, and the legend"
    assert len({square.get("fill") for square in squares}) == 1
    assert {square.get("fill") for square in squares}.isdisjoint(
        circle.get("fill") for circle in drawn.findall("{*}circle")
    )
    words = [item.text or "" for item in drawn.findall("{*}text")]
    assert sum("vllm 0.26.0" in text for text in words) == 2
    assert any("squares: other engines" in text for text in words)
    assert not any("squares" in (item.text or "") for item in alone.findall("{*}text"))


def test_no_two_systems_share_a_colour() -> None:
    root = Path(__file__).parents[2]
    published = [load(path) for path in sorted((root / RESULTS).glob("*.json"))]
    systems = {line.system for line in lines_of(published)}
    assert len(set(plotting._COLOURS)) == len(plotting._COLOURS) >= len(systems) + 2, "room for a peer or two"


def test_a_peer_beside_ours_is_taken_into_tables_and_plot(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"{BEGIN}\n{END}\n")
    for result in (*(serve_result(users) for users in (1, 8, 32)), peer_result((1, 8, 32))):
        save(result, tmp_path / "new")
    assert main(["--root", str(tmp_path), "--add", str(tmp_path / "new")]) == 0
    assert len(ET.fromstring((tmp_path / RESULTS / "throughput.svg").read_text()).findall("{*}polyline")) == 4
    assert "| vllm-speculative 0.26.0 | 3 | 128 | 128 | 8 | 1 |" in (tmp_path / RESULTS / "README.md").read_text()
    assert main(["--check", "--root", str(tmp_path)]) == 0
