"""The wire benchmark: what is asked and answered, and that the other process goes when it should."""

import pytest

from outrider.benchmarks.wire.echo import HEADER_BYTES, make_request, reply_to
from outrider.benchmarks.wire.run import WirePlan, run_plan, to_result, to_rows
from outrider.errors import ConfigError


@pytest.mark.parametrize("num_bytes", [HEADER_BYTES, 200, 70_001])
@pytest.mark.parametrize("reply_bytes", [0, 1, 16, 70_001])
def test_requests_and_replies_have_the_sizes_asked_for(num_bytes: int, reply_bytes: int) -> None:
    request = make_request(num_bytes, reply_bytes)
    assert len(request) == num_bytes
    assert len(reply_to(request)) == reply_bytes


def test_every_combination_is_measured_between_two_processes() -> None:
    plan = WirePlan(num_bytes=(200, 3_000), reply_bytes=None, num_samples=3, num_warmups=1)
    done: list[None] = []
    series = run_plan(plan, on_done=lambda: done.append(None))
    assert len(series) == plan.num_cases == len(done) == 8
    assert {(s.labels["call"], s.labels["over"]) for s in series} == {
        ("unary", "tcp"), ("unary", "unix"), ("stream", "tcp"), ("stream", "unix")
    }  # fmt: skip
    assert all(len(s.samples) == 3 and min(s.samples) > 0 for s in series)
    assert all(s.labels["reply_bytes"] == s.labels["num_bytes"] for s in series)
    assert len(to_rows(series)) == 8
    assert to_result(series, plan, name="some").kind == "rpc"


@pytest.mark.parametrize(
    ("field", "plan"),
    [("--num-bytes", {"num_bytes": (4,)}), ("--call", {"calls": ("pigeon",)}), ("--over", {"over": ()})],
)
def test_what_cannot_be_measured_is_refused_by_name(field: str, plan: dict[str, tuple[int | str, ...]]) -> None:
    with pytest.raises(ConfigError, match=field):
        WirePlan(**plan)  # type: ignore[arg-type]
