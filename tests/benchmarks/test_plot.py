"""README's comparison: which results it selects, its table, and the plot, which changes with the figures alone."""

import xml.etree.ElementTree as ET
from pathlib import Path

from outrider.benchmarks.report import BEGIN, END, main
from outrider.benchmarks.schema import RESULTS, Result, save
from outrider.benchmarks.tables.comparison import compared_systems, comparison_table
from outrider.benchmarks.tables.plot import plot
from tests.benchmarks.made_results import engines_result, peer_result, serve_result

_NAME = "h200-http-8b-1b"


def results_of_the_comparison() -> list[Result]:
    theirs = {"vllm-speculative": (4.0, (1, 8)), "vllm": (8.0, (1, 8))}
    own = {"outrider-speculative": (3.0, (8, 1, 128)), "outrider": (6.0, (8, 1, 128))}
    return [engines_result(_NAME, {**theirs, **own})]


def test_systems_are_ours_and_then_the_peers_each_alone_first() -> None:
    systems = compared_systems(results_of_the_comparison())
    assert [(system.name, system.is_plain) for system in systems] == [
        ("Outrider, target alone", True),
        ("Outrider, with the draft", False),
        ("vLLM 0.26.0, target alone", True),
        ("vLLM 0.26.0, with the draft", False),
    ]


def test_points_are_in_order_of_users_per_gpu_and_from_the_mean_over_streams() -> None:
    plain, drafted, _, peer = compared_systems(results_of_the_comparison())
    assert list(drafted.points) == [1, 8, 128]
    assert (drafted.points[8].per_gpu, drafted.points[8].per_user) == (8e3 / 6, 1e3 / 3)
    assert (plain.points[1].per_gpu, plain.points[1].per_user) == (1e3 / 12, 1e3 / 6)
    assert (peer.points[8].per_gpu, peer.points[8].per_user) == (1000.0, 250.0)


def test_results_of_other_names_are_no_part_of_it() -> None:
    assert compared_systems([serve_result(1), peer_result("vllm-other", (1,))]) == []
    assert comparison_table([serve_result(1)]) == ""
    assert plot([serve_result(1)]) == ""


def test_the_table_has_a_row_for_each_number_of_users_and_the_gain_of_drafting() -> None:
    text = comparison_table(results_of_the_comparison())
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert rows[0][0] == "users" and rows[0][-1] == "Outrider's gain from drafting"
    by_users = {row[0]: row for row in rows[2:]}
    assert list(by_users) == ["1", "8", "32", "128"]
    assert by_users["8"][1:3] == ["6.00", "3.00"] and by_users["8"][-1] == "2.00"
    assert by_users["128"][3:5] == ["", ""], "the peer was not measured with 128 users"
    assert set(by_users["32"][1:]) == {""}


def test_the_plot_has_a_line_for_each_system_and_names_it() -> None:
    drawn = ET.fromstring(plot(results_of_the_comparison()))
    words = [item.text for item in drawn.iter("{http://www.w3.org/2000/svg}text")]
    for system in compared_systems(results_of_the_comparison()):
        assert system.name in words
    assert {"1", "8", "128"} <= set(words)


def test_the_plot_is_a_file_that_the_report_keeps_fresh(tmp_path: Path) -> None:
    for result in results_of_the_comparison():
        save(result, tmp_path / RESULTS)
    (tmp_path / "README.md").write_text(f"{BEGIN}\n{END}\n")
    assert main(["--root", str(tmp_path)]) == 0
    drawn = tmp_path / RESULTS / "throughput.svg"
    assert main(["--check", "--root", str(tmp_path)]) == 0
    drawn.write_text("old")
    assert main(["--check", "--root", str(tmp_path)]) == 1


def test_new_results_reach_the_table_the_plot_and_the_page_of_results(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"{BEGIN}\n{END}\n")
    for result in results_of_the_comparison():
        save(result, tmp_path / "new")
    assert main(["--root", str(tmp_path), "--add", str(tmp_path / "new")]) == 0
    assert "| 8 | 6.00 | 3.00 |" in (tmp_path / "README.md").read_text()
    assert "| vllm-speculative 0.26.0 | 3 | 128 | 128 | 8 | 1 |" in (tmp_path / RESULTS / "README.md").read_text()
    assert main(["--check", "--root", str(tmp_path)]) == 0
