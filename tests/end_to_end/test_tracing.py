"""The traces of three real processes, as a collector gets them over OTLP."""

from __future__ import annotations

import itertools
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider import Client
from outrider.cli.app import app
from outrider.cli.trace.reading import read_spans
from outrider.cli.trace.tree import build_tree
from outrider.telemetry.tracing import TraceContext, names
from outrider.telemetry.tracing.span import Span, SpanKind
from tests.end_to_end.commands import PATIENT, Command, wait_until
from tests.support.otlp_receiver import OtlpReceiver

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = "00-1af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
ASK: dict[str, Any] = {
    "prompt_token_ids": [1, 2, 3],
    "max_tokens": 40,
    "temperature": 0.7,
    "seed": 3,
    "ignore_eos": True,
}
STAGES = (names.QUEUE_NS, names.FORWARD_NS, names.SAMPLE_NS, names.WAIT_NS)
ITEMS = {"outrider-draft": names.PROPOSE_ITEM, "outrider-target": names.SCORE_ITEM}


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("traces")
    return {service: folder / f"{service}.jsonl" for service in ("target", "draft", "coordinator")}


@pytest.fixture(scope="module")
def traced(tiny_pair: tuple[Path, Path], receiver: OtlpReceiver, files: dict[str, Path]) -> Iterator[Command]:
    target, draft = tiny_pair
    to_files = [word for name, path in files.items() for word in ("--set", f"{name}.trace_file={path}")]
    fixed = ("-k", "4", "--set", "coordinator.draft_length=fixed", "--served-model-name", "mine")
    command = Command(
        str(target), "--draft-model", str(draft), *fixed, *PATIENT, *to_files, environment=receiver.environment
    )
    command.attached()
    yield command
    command.close()


def collect(receiver: OtlpReceiver, trace_id: str, *, items: bool = True) -> list[Span]:
    """All spans of a trace, when its request and all that its steps asked of the services are there."""
    found: list[Span] = []

    def is_complete() -> bool:
        found[:] = [span for span in receiver.spans if span.trace_id == trace_id]
        by_name = Counter(span.name for span in found)
        asked = {names.PROPOSE_ITEM: by_name[names.DRAFT], names.SCORE_ITEM: by_name[names.SCORE]}
        requests = [span for span in found if span.kind is SpanKind.SERVER and span.service == "outrider-coordinator"]
        has_decode = by_name[names.DECODE] > 0 or any(request.error for request in requests)
        has_steps = all(
            number(decode, names.NUM_STEPS) - number(decode, names.NUM_STEPS_NOT_SHOWN) == by_name[names.ACCEPT]
            for decode in found
            if decode.name == names.DECODE
        )
        return (
            bool(requests)
            and has_decode
            and has_steps
            and (not items or all(by_name[key] >= n for key, n in asked.items()))
        )

    wait_until(is_complete, f"trace {trace_id}", found)
    return found


def named(spans: list[Span], name: str) -> list[Span]:
    return sorted((span for span in spans if span.name == name), key=lambda span: span.start_ns)


def named_below(spans: list[Span], parent: Span) -> list[Span]:
    return [span for span in spans if span.parent_id == parent.span_id]


def request_of(spans: list[Span]) -> Span:
    (request,) = [span for span in spans if span.name.startswith(names.TEXT_COMPLETION)]
    return request


def number(span: Span, name: str) -> int:
    value = span.attributes[name]
    assert isinstance(value, int)
    return value


def test_grammars_are_seen(traced: Command, receiver: OtlpReceiver) -> None:
    asked = {name: value for name, value in ASK.items() if name != "ignore_eos"}
    with Client(traced.address()) as client:
        result = client.generate(**asked, regex="[a-z]{3,9}", trace_parent=CALLER.replace("0af", "9af"))
    spans = collect(receiver, result.trace_id)
    (compiled,) = named(spans, names.COMPILE_GRAMMAR)
    assert compiled.parent_id == request_of(spans).span_id
    by_id = {span.span_id: span for span in spans}
    above = {by_id[span.parent_id].name for span in named(spans, names.MASK) if span.parent_id in by_id}
    assert names.SCORE_ITEM in above


def test_one_trace_of_three_processes_with_the_right_parents(traced: Command, receiver: OtlpReceiver) -> None:
    with Client(traced.address()) as client:
        result = client.generate(**ASK, trace_parent=CALLER)
    caller = TraceContext.parse(CALLER)
    assert caller is not None
    assert result.trace_id == caller.trace_id
    spans = collect(receiver, result.trace_id)
    assert {span.service for span in spans} == {"outrider-coordinator", *ITEMS}
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans)

    request = request_of(spans)
    assert request.parent_id == caller.span_id
    (decode,) = named(spans, names.DECODE)
    parents = {
        names.TOKENIZE: request.name,
        names.PREFILL: request.name,
        names.DECODE: request.name,
        names.STEP: names.DECODE,
        names.DRAFT: names.STEP,
        names.SCORE: names.STEP,
        names.ACCEPT: names.STEP,
        names.WIRE: names.STEP,
        names.PROPOSE_ITEM: names.DECODE,
        names.SCORE_ITEM: names.DECODE,
    }
    for span in spans:
        if span is not request:
            assert span.duration_ns >= 0, span
            assert by_id[span.parent_id].name in {parents.get(span.name), *ITEMS.values(), request.name}, span
            if span.name in parents:
                assert by_id[span.parent_id].name == parents[span.name], span
    for span in (*named(spans, names.FORWARD), *named(spans, names.SAMPLE)):
        assert by_id[span.parent_id].name == ITEMS[span.service]
    steps = named(spans, names.STEP)
    assert len(steps) == result.speculation.num_steps == number(decode, names.NUM_STEPS)
    assert sum(number(step, names.NUM_ACCEPTED) for step in steps) == result.speculation.num_accepted_tokens
    assert sum(number(step, names.DRAFT_LENGTH) for step in steps) == result.speculation.num_draft_tokens
    assert [number(step, names.STEP_NUMBER) for step in steps] == list(range(1, len(steps) + 1))
    assert number(steps[0], names.BASE_LENGTH) == len(ASK["prompt_token_ids"])


def test_the_request_says_how_it_was_asked_for_and_what_came_of_it(traced: Command, receiver: OtlpReceiver) -> None:
    with Client(traced.address()) as client:
        result = client.generate(**ASK, request_id="of-a-test")
    request = request_of(collect(receiver, result.trace_id))
    assert not request.parent_id
    expected = {
        names.OPERATION_NAME: "text_completion",
        names.REQUEST_MODEL: "mine",
        names.RESPONSE_MODEL: "mine",
        names.REQUEST_MAX_TOKENS: 40,
        names.REQUEST_TEMPERATURE: 0.7,
        names.REQUEST_SEED: 3,
        names.USAGE_INPUT_TOKENS: 3,
        names.USAGE_OUTPUT_TOKENS: 40,
        names.RESPONSE_FINISH_REASONS: ("length",),
        names.REQUEST_ID: "of-a-test",
    }
    assert expected.items() <= request.attributes.items()
    assert not request.error


def test_stages_add_up_and_no_wire_is_negative(traced: Command, receiver: OtlpReceiver) -> None:
    with Client(traced.address()) as client:
        result = client.generate(**ASK)
    spans = collect(receiver, result.trace_id)
    own: dict[int, int] = {}
    for item in (span for span in spans if span.name in ITEMS.values()):
        total = number(item, names.TOTAL_NS)
        assert sum(number(item, name) for name in STAGES) == pytest.approx(total, rel=0.02)
        assert item.duration_ns == pytest.approx(total, rel=0.02)
        parts = sorted(named_below(spans, item), key=lambda span: span.start_ns)
        assert sum(span.duration_ns for span in parts) == pytest.approx(total, rel=0.02)
        # Each by readings of its own: one after the other, none within another.
        assert all(before.end_ns <= after.start_ns for before, after in itertools.pairwise(parts))
        own[number(item, names.GENERATION)] = total
    stages = named(spans, names.DRAFT) + named(spans, names.SCORE)
    assert sorted(number(stage, names.TOTAL_NS) for stage in stages) == sorted(own.values())
    for stage in stages:
        wire = number(stage, names.WIRE_NS)
        assert wire >= 0
        assert wire + number(stage, names.TOTAL_NS) == number(stage, names.INTERVAL_NS)
        assert stage.duration_ns == number(stage, names.TOTAL_NS)
    wires = named(spans, names.WIRE)
    assert sorted(wire.duration_ns for wire in wires) == sorted(number(stage, names.WIRE_NS) for stage in stages)
    for step in named(spans, names.STEP):
        inside = sum(span.duration_ns for span in spans if span.parent_id == step.span_id)
        assert inside > 0


def test_what_its_caller_does_not_record_is_not_recorded(traced: Command, receiver: OtlpReceiver) -> None:
    with Client(traced.address()) as client:
        unsampled = client.generate(**ASK, trace_parent=UNSAMPLED)
        sampled = client.generate(**ASK)
    assert UNSAMPLED.split("-")[1] == unsampled.trace_id
    collect(receiver, sampled.trace_id)  # came later, and is there
    assert not [span for span in receiver.spans if span.trace_id == unsampled.trace_id]


def test_a_cancelled_request_ends_its_spans(traced: Command, receiver: OtlpReceiver) -> None:
    trace = "00-2af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with Client(traced.address()) as client:
        stream = client.stream(**{**ASK, "max_tokens": 4000}, trace_parent=trace)
        next(stream)
        stream.close()
    spans = collect(receiver, trace.split("-")[1], items=False)
    request = request_of(spans)
    assert request.attributes[names.ERROR_TYPE] == "cancelled"
    assert request.error
    assert named(spans, names.DECODE)[0].error


def test_a_refused_request_is_one_span_with_its_error(traced: Command, receiver: OtlpReceiver) -> None:
    trace = "00-3af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with Client(traced.address()) as client, pytest.raises(Exception, match="prompt_token_ids"):
        client.generate(prompt_token_ids=[10**6], trace_parent=trace)
    (request,) = collect(receiver, trace.split("-")[1])
    assert request.attributes[names.ERROR_TYPE] == "InvalidRequestError"
    assert "prompt_token_ids" in request.error


def test_many_requests_at_once_share_forwards_that_link_to_them(traced: Command, receiver: OtlpReceiver) -> None:
    with Client(traced.address()) as client:
        streams = [client.stream(**{**ASK, "seed": seed, "max_tokens": 300}) for seed in range(4)]
        for stream in streams:
            next(stream)  # begins it
        results = [list(stream)[-1].result for stream in streams]
    traces = {result.trace_id for result in results if result is not None}
    assert len(traces) == len(streams)
    for trace_id in traces:
        collect(receiver, trace_id)

    def shared() -> list[Span]:
        return [span for span in receiver.spans if span.name == names.FORWARD and span.links]

    wait_until(shared, "a shared forward")
    for forward in shared():
        assert len(forward.links) >= 2
        assert number(forward, names.BATCH_SIZE) >= len(forward.links)
        assert not forward.parent_id
    items = {span.span_id: span for span in receiver.spans if span.name in ITEMS.values()}
    linked = [link for forward in shared() for link in forward.links]
    assert all(items[link.span_id].trace_id == link.trace_id for link in linked if link.span_id in items)
    assert any(link.span_id in items for link in linked)


def test_the_command_draws_a_request_of_spans_that_the_services_send_it(
    traced: Command, receiver: OtlpReceiver, tmp_path: Path
) -> None:
    page = tmp_path / "out.html"
    of_request = ("--prompt", "ab", "--address", traced.address(), "--max-tokens", "12", "--wait", "200")
    with receiver.away():
        listen = f"127.0.0.1:{receiver.port}"
        outcome = CliRunner().invoke(app, ["trace", *of_request, "--listen", listen, "--html", str(page)])
    assert outcome.exit_code == 0, outcome.output
    assert "are not there" not in outcome.stderr
    found = re.search(r"^trace (\w{32}) .* 12 tokens in ", outcome.stdout)
    assert found
    assert all(f"\n{stage}" in outcome.stdout for stage in ("draft: forward", "score: forward", "wire", "accept"))
    assert found[1] in page.read_text()
    assert not [span for span in receiver.spans if span.trace_id == found[1]]


def test_the_command_draws_a_request_that_it_makes(traced: Command, files: dict[str, Path], tmp_path: Path) -> None:
    page = tmp_path / "out.html"
    of_request = ("--prompt", "ab", "--address", traced.address(), "--max-tokens", "12", "--wait", "200")
    outcome = CliRunner().invoke(app, ["trace", *map(str, files.values()), *of_request, "--html", str(page)])
    assert outcome.exit_code == 0, outcome.output
    assert "are not there" not in outcome.stderr
    found = re.search(r"^trace (\w{32}) .* 12 tokens in ", outcome.stdout)
    assert found
    assert re.search(r"^2 +[\d.]+ ms +\d of 4", outcome.stdout, re.MULTILINE)
    assert all(f"\n{stage}" in outcome.stdout for stage in ("draft: forward", "score: forward", "wire", "accept"))
    assert found[1] in page.read_text()
    root = build_tree(read_spans(list(files.values())), found[1])
    steps = [step for decode in root.named(names.DECODE) for step in decode.named(names.STEP)]
    for stage in [stage for step in steps for stage in step.children if stage.span.name in (names.DRAFT, names.SCORE)]:
        (item,) = stage.children
        assert item.start_ns == stage.start_ns
        assert item.span.duration_ns == pytest.approx(stage.span.duration_ns, rel=0.02)


def test_a_draft_that_is_killed_does_not_lose_the_trace(traced: Command, receiver: OtlpReceiver) -> None:
    trace = "00-4af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with Client(traced.address()) as client:
        wait_until(lambda: client.model_info().draft_attached, "the draft attached")
        stream = client.stream(**{**ASK, "max_tokens": 1000}, trace_parent=trace)
        next(stream)
        os.kill(traced.children()["outrider_draft"], signal.SIGKILL)
        result = list(stream)[-1].result
    assert result is not None
    spans = collect(receiver, trace.split("-")[1], items=False)
    (decode,) = named(spans, names.DECODE)
    assert number(decode, names.USAGE_OUTPUT_TOKENS) == 1000
    assert len(named(spans, names.STEP)) + number(decode, names.NUM_STEPS_NOT_SHOWN) == result.speculation.num_steps
    assert not request_of(spans).error
    unfinished = [span for span in named(spans, names.DRAFT) if span.attributes[names.OUTCOME] == "no answer"]
    assert len(unfinished) <= 1
