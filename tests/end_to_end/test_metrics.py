"""Metrics of three real processes after real requests: every catalogued metric, with figures that add up."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from outrider import Client
from outrider.cli.stack.held_ports import HeldPort
from outrider.errors import InvalidRequestError
from outrider.telemetry.metrics.catalogue import CATALOGUE, MetricKind, MetricSpec
from tests.end_to_end.commands import PATIENT, Command, wait_until

ROLES = ("coordinator", "target", "draft")


class Scraped:
    """One process's metrics at one moment."""

    def __init__(self, port: int) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=120) as answer:
            text = answer.read().decode()
        self.families: dict[str, Metric] = {family.name: family for family in text_string_to_metric_families(text)}

    def value(self, sample: str, **labels: str) -> float:
        found = [
            entry.value
            for family in self.families.values()
            for entry in family.samples
            if entry.name == sample and labels.items() <= entry.labels.items()
        ]
        assert found, f"no {sample} {labels}"
        return sum(found)


@pytest.fixture(scope="module")
def metered(tiny_pair: tuple[Path, Path]) -> Iterator[tuple[Command, int]]:
    """`outrider serve` with metrics, and the first of their three ports."""
    held = ports_in_a_row(3)
    first = held[0].number
    target, draft = map(str, tiny_pair)
    fixed = ("-k", "4", "--set", "coordinator.draft_length=fixed", "--set", "coordinator.vllm_metric_names=true")
    named = ("--served-model-name", "mine")
    command = Command(target, "--draft-model", draft, "--metrics-port", str(first), *fixed, *named, *PATIENT)
    command.attached()
    yield command, first
    command.close()
    for port in held:
        port.close()


def ports_in_a_row(count: int) -> list[HeldPort]:
    """Ports that are held, each one above that before it."""
    while True:
        held = [HeldPort()]
        try:
            held += [HeldPort(held[0].number + place) for place in range(1, count)]
        except OSError:  # one of them is taken
            held[0].close()
        else:
            return held


@pytest.fixture(scope="module")
def scraped(metered: tuple[Command, int]) -> dict[str, Scraped]:
    command, first = metered
    with Client(command.address()) as client:
        for temperature in (0.0, 1.0):
            client.generate(prompt_token_ids=[1, 2, 3], max_tokens=40, temperature=temperature, ignore_eos=True, seed=1)
        with pytest.raises(InvalidRequestError):
            client.generate(prompt_token_ids=[1_000_000], max_tokens=4)
    for place, role in enumerate(ROLES[1:], 1):  # whose last forwards have ended then
        wait_until(lambda: Scraped(first + place).value("outrider_kv_pages_used") == 0, f"free pages of the {role}")  # noqa: B023
    return {role: Scraped(first + place) for place, role in enumerate(ROLES)}


def family_name(spec: MetricSpec) -> str:
    return spec.name.removesuffix("_total") if spec.kind is MetricKind.COUNTER else spec.name


@pytest.mark.parametrize("role", ROLES)
def test_every_catalogued_metric_is_there_and_none_besides(scraped: dict[str, Scraped], role: str) -> None:
    mine = {family_name(spec): spec for spec in CATALOGUE if role in spec.roles}
    said = {name: family for name, family in scraped[role].families.items() if name.startswith("outrider_")}
    assert set(said) == set(mine)
    for name, family in said.items():
        spec = mine[name]
        assert family.type == spec.kind.value
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == {label.name for label in spec.labels}, sample


@pytest.mark.parametrize("role", ROLES)
def test_the_process_is_told_as_well(scraped: dict[str, Scraped], role: str) -> None:
    assert scraped[role].value("process_resident_memory_bytes") > 1e6
    assert scraped[role].value("outrider_build_info", role=role) == 1


def test_speculation_adds_up(scraped: dict[str, Scraped]) -> None:
    value = scraped["coordinator"].value
    prefix = "outrider_spec_decode_num_"
    drafts, accepted = value(f"{prefix}drafts_total"), value(f"{prefix}accepted_tokens_total")
    assert value(f"{prefix}emitted_tokens_total") == 80
    assert value("outrider_steps_total") == drafts + value("outrider_steps_without_draft_total")
    assert value("outrider_steps_without_draft_total", reason="prefill") == 2
    assert value(f"{prefix}accepted_tokens_per_pos_total") == accepted
    assert accepted <= value(f"{prefix}judged_tokens_total") <= value(f"{prefix}draft_tokens_total")
    assert drafts > 0


def test_requests_and_their_times_are_counted(scraped: dict[str, Scraped]) -> None:
    value = scraped["coordinator"].value
    assert value("outrider_requests_total", outcome="length") == 2
    assert value("outrider_requests_refused_total", reason="invalid") == 1
    assert value("outrider_prompt_tokens_total") == value("outrider_request_prompt_tokens_sum") == 6
    assert value("outrider_request_generation_tokens_sum") == 80
    assert value("outrider_request_generation_tokens_count") == 2
    assert value("outrider_replicas_attached", side="target") == value("outrider_replicas_attached", side="draft") == 1
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_time_per_output_token"):
        assert value(f"outrider_{name}_seconds_count") == 2
    steps = value("outrider_steps_total")
    assert value("outrider_step_stage_seconds_count", stage="score") == steps
    assert value("outrider_step_stage_seconds_count", stage="accept") == steps
    for stage in ("score", "accept"):  # each request had one prefill
        assert value("outrider_step_stage_seconds_count", phase="prefill", stage=stage) == 2
        assert value("outrider_step_stage_seconds_count", phase="decode", stage=stage) == steps - 2
    assert value("outrider_step_stage_seconds_count", phase="prefill", stage="draft") == 0
    assert value("outrider_inter_token_latency_seconds_count") == steps - 2
    whole = value("outrider_e2e_request_latency_seconds_sum")
    stages = sum(
        value("outrider_step_stage_seconds_sum", stage=stage) for stage in ("draft", "score", "accept", "wire")
    )
    assert 0 < stages <= whole


def test_vllms_names_say_the_same_where_they_are_asked_for(scraped: dict[str, Scraped]) -> None:
    value = scraped["coordinator"].value
    assert value("outrider_build_info", model="mine") == 1
    assert value("vllm:request_success_total", finished_reason="length", model_name="mine", engine="0") == 2
    assert value("vllm:generation_tokens_total") == 80
    assert value("vllm:num_requests_waiting") == 0
    assert 0 <= value("vllm:kv_cache_usage_perc") == value("outrider_kv_cache_usage_perc") < 1
    assert value("vllm:time_to_first_token_seconds_count") == 2
    drafted = value("vllm:spec_decode_num_draft_tokens_total")
    assert drafted == value("outrider_spec_decode_num_draft_tokens_total") > 0
    assert not any(name.startswith("vllm:") for role in ("target", "draft") for name in scraped[role].families)


@pytest.mark.parametrize("role", ["draft", "target"])
def test_services_count_their_forwards(scraped: dict[str, Scraped], role: str) -> None:
    value = scraped[role].value
    forwards = value("outrider_forward_batch_size_count", role=role)
    assert forwards == value("outrider_forward_tokens_count") > 10
    for stage in ("forward", "sample"):
        assert value("outrider_forward_stage_seconds_count", stage=stage) == forwards
    assert value("outrider_sessions_opened_total") == 2
    assert value("outrider_model_load_seconds") > 0
    used, free = value("outrider_kv_pages_used"), value("outrider_kv_pages_free")
    assert free > 0
    assert value("outrider_kv_cache_usage_perc", role=role) == pytest.approx(used / (used + free))
