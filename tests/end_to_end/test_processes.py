"""`outrider serve` as real processes: health, reflection, signals, kills, and what it says when it cannot start."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from outrider import Client
from outrider.errors import UnavailableError
from outrider.generation import Delta
from outrider.v1 import link_pb2
from outrider.v1.link_pb2_grpc import DraftServiceStub, TargetServiceStub
from tests.end_to_end.commands import DEADLINE_S, SERVICES, Command, wait_until
from tests.support.processes import is_alive

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
PUBLIC_NAMES = {
    "outrider_coordinator": "outrider.v1.GenerationService",
    "outrider_target": "outrider.v1.TargetService",
    "outrider_draft": "outrider.v1.DraftService",
}
MODULES = pytest.mark.parametrize("module", sorted(SERVICES))
LONG: dict[str, Any] = {"prompt_token_ids": [1, 2, 3], "max_tokens": 1000, "temperature": 0, "ignore_eos": True}


@contextlib.contextmanager
def channel_to(address: str) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        yield channel


def health(channel: grpc.Channel, name: str) -> Any:
    request = health_pb2.HealthCheckRequest(service=name)
    return health_pb2_grpc.HealthStub(channel).Check(request, timeout=120).status


def token_ids(deltas: list[Delta]) -> tuple[int, ...]:
    return tuple(token_id for delta in deltas for token_id in delta.token_ids)


def test_it_says_where_it_serves_and_on_what_and_serves(served: Command, client: Client) -> None:
    info = client.model_info()
    assert info.num_speculative_tokens == 3
    assert info.draft_attached
    short = {**LONG, "max_tokens": 24}
    assert client.generate(**short).token_ids == client.generate(**{**short, "num_speculative_tokens": 0}).token_ids
    target, draft = info.target_placement, info.draft_placement
    assert (target.device, target.dtype, draft.device) == ("cpu", "float32", "cpu")
    assert target.kv_cache_tokens > 0
    wait_until(lambda: len(served.out) >= 5, "the facts below the ready line", served.out)
    assert served.out[1].endswith(f" on cpu, float32, KV cache {target.kv_cache_tokens:,} tokens\n")
    assert served.out[1].startswith("  target: ") and served.out[2].startswith("  draft: ")
    assert served.out[3] == "  drafts: 3 tokens in each step\n"
    assert served.out[4] == "  output: that of the target alone; near ties may depend on the batch\n"


def test_generate_and_info_on_the_command_line(served: Command) -> None:
    options = ("--address", served.address())
    made = outrider("generate", "ab", "--max-tokens", "8", "-t", "0", "--ignore-eos", "--stats", *options)
    assert made.stdout.endswith("\n")
    for name in (
        "time to first token",
        "acceptance rate",
        "mean acceptance length",
        "in draft",
        "in target",
        "on the wire",
    ):
        assert name in made.stderr
    assert len(re.findall(r"ms \(prefill [\d.]+, decode [\d.]+\)", made.stderr)) == 4
    shown = outrider("info", *options).stdout
    assert re.search(r"^drafts +3 tokens in each step", shown, re.MULTILINE)
    assert re.search(r"^output +that of the target alone; near ties may depend", shown, re.MULTILINE)
    assert re.search(r"^ +cpu, float32, KV cache [\d,]+ tokens, [\d,]+ free *$", shown, re.MULTILINE)
    facts = json.loads(outrider("info", "--json", *options).stdout)
    assert (facts["num_speculative_tokens"], facts["target_placement"]["device"]) == (3, "cpu")


def outrider(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command, which has to end well."""
    command = [sys.executable, "-m", "outrider.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)


@MODULES
def test_every_service_answers_health_by_name(served: Command, module: str) -> None:
    with channel_to(served.address_of(module)) as channel:
        for name in ("", PUBLIC_NAMES[module], "liveness"):
            assert health(channel, name) == SERVING, name
        with pytest.raises(grpc.RpcError) as caught:
            health(channel, "outrider.v1.Nobody")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@MODULES
def test_every_service_answers_reflection(served: Command, module: str) -> None:
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=PUBLIC_NAMES[module]),
    ]
    with channel_to(served.address_of(module)) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        listed, described = stub.ServerReflectionInfo(iter(requests), timeout=120)
    names = {service.name for service in listed.list_services_response.service}
    assert {PUBLIC_NAMES[module], "grpc.health.v1.Health"} <= names
    assert described.file_descriptor_response.file_descriptor_proto


@pytest.mark.parametrize("module", ["outrider_target", "outrider_draft"])
def test_a_stranger_gets_no_link_to_a_served_model(served: Command, module: str) -> None:
    stub: Any = {"outrider_target": TargetServiceStub, "outrider_draft": DraftServiceStub}[module]
    with channel_to(served.address_of(module)) as channel:
        calls: tuple[Callable[[], Any], ...] = (
            lambda: stub(channel).Describe(link_pb2.DescribeRequest(), timeout=120),
            lambda: next(stub(channel).Attach(iter(()), timeout=120)),
        )
        for call in calls:
            with pytest.raises(grpc.RpcError) as caught:
                call()
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_draft_killed_in_the_middle_of_a_stream_is_not_noticed(served: Command, client: Client) -> None:
    plain = client.generate(**{**LONG, "num_speculative_tokens": 0}).token_ids
    before = served.children()["outrider_draft"]
    stream = client.stream(**LONG)
    deltas = [next(stream)]
    os.kill(before, signal.SIGKILL)
    deltas += stream
    assert token_ids(deltas) == plain
    wait_until(lambda: served.children().get("outrider_draft", before) != before, "a new draft", served.err)
    wait_until(lambda: client.model_info().draft_attached, "the draft attached", served.err)
    again = client.generate(**{**LONG, "max_tokens": 100})
    assert again.token_ids == plain[:100]
    assert again.speculation.num_draft_tokens > 50
    assert any(line.startswith("draft: ended: killed by SIGKILL") for line in served.err)


def test_sigterm_lets_a_running_stream_finish_and_leaves_nobody(served: Command, client: Client) -> None:
    children = served.children()
    assert set(children) == SERVICES
    with channel_to(served.address()) as channel:
        stream = client.stream(**LONG)
        deltas = [next(stream)]
        served.terminate()
        wait_until(
            lambda: health(channel, PUBLIC_NAMES["outrider_coordinator"]) == NOT_SERVING, "NOT_SERVING", served.err
        )
        assert client.model_info().num_running == 1
        assert health(channel, "") == NOT_SERVING
        assert health(channel, "liveness") == SERVING
        deltas += stream
    assert deltas[-1].result is not None
    assert len(token_ids(deltas)) == LONG["max_tokens"]
    code, said = served.wait()
    assert code == 0, said
    assert not any(is_alive(pid) for pid in children.values())


def test_kill_of_the_parent_in_the_middle_of_a_stream_leaves_nobody(served: Command, client: Client) -> None:
    children = served.children()
    assert set(children) == SERVICES
    stream = client.stream(**LONG)
    next(stream)
    served.process.kill()
    wait_until(lambda: not any(is_alive(pid) for pid in children.values()), "no child left")
    with pytest.raises(UnavailableError):
        list(stream)


def test_nobody_reads_what_it_says_and_a_killed_draft_is_back(tiny_pair: tuple[Path, Path]) -> None:
    command = Command(str(tiny_pair[0]), "--method", "ngram", "-vv", closes_output_when_ready=True)
    try:
        address = command.address()
        before = command.children()["outrider_draft"]
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: command.children().get("outrider_draft", before) != before, "a new draft")
        with Client(address) as client:
            wait_until(lambda: client.model_info().draft_attached, "the draft attached")
            assert len(client.generate(**{**LONG, "max_tokens": 8}).token_ids) == 8
        command.terminate()
        assert command.wait()[0] == 0
    finally:
        command.close()


def missing(folder: Path) -> None:
    shutil.rmtree(folder)


def unknown(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text(encoding="utf-8").replace("LlamaFor", "MammothFor"), encoding="utf-8")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (missing, "target model: {folder} does not exist"),
        (unknown, "decoder of model_type llama is LlamaForCausalLM, not ['MammothForCausalLM']"),
    ],
)
def test_a_target_that_cannot_be_served_is_told_in_one_line(
    tiny_pair: tuple[Path, Path], tmp_path: Path, spoil: Callable[[Path], None], words: str
) -> None:
    folder = Path(shutil.copytree(tiny_pair[0], tmp_path / "target"))
    spoil(folder)
    check_refused(Command(str(folder)), words.format(folder=folder))


def test_a_draft_with_another_tokenizer_is_told_in_one_line(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    target, draft = tiny_pair[0], Path(shutil.copytree(tiny_pair[1], tmp_path / "draft"))
    path = draft / "tokenizer.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"a": ', '"aa": '), encoding="utf-8")
    check_refused(Command(str(target), "--draft-model", str(draft)), "'aa' in the draft and 'a' in the target")


def test_a_port_in_use_is_told_in_one_line(tiny_pair: tuple[Path, Path]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        check_refused(Command(str(tiny_pair[0]), port=port), f"127.0.0.1:{port} is in use")


def check_refused(command: Command, words: str) -> None:
    """Exit code 1 and one line that says why; nothing is left."""
    try:
        code, said = command.wait()
    finally:
        command.close()
    errors = [line for line in said if line.startswith("error: ")]
    assert (code, len(errors), command.out) == (1, 1, []), said
    assert words in errors[0]
    assert not any("Traceback" in line for line in said), said
