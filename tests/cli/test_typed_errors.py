"""Errors of a command line name what was typed: a flag in its spelling, a variable, a key of a file."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.cli.app import app
from outrider.cli.facts import draft_length_text
from outrider.cli.serve_settings import flag_names
from outrider.cli.stack.plan import ServiceSpec, StackPlan, with_typed_names
from outrider.cli.stack.process import ChildProcess
from outrider.cli.typed import Typed
from outrider.client import Client
from outrider.config import load_all
from outrider.errors import ConfigError

runner = CliRunner()
NOT_HERE = "192.0.2.1"
"""Reserved for documentation: no host has it."""


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Looks like a model to whoever does not load it."""
    folder = tmp_path / "model"
    folder.mkdir()
    content = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 2048}
    (folder / "config.json").write_text(json.dumps(content))
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "tokenizer.json").write_text("{}")
    return str(folder)


@pytest.fixture
def taken() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield str(listener.getsockname()[1])


def told(*words: str, env: dict[str, str] | None = None) -> str:
    outcome = runner.invoke(app, [*words], env=env or {})
    assert outcome.exit_code == 1, outcome.output
    assert outcome.stderr.count("\n") == 1
    return outcome.stderr.removeprefix("error: ").strip()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (f"--host {NOT_HERE}", f"--host: {NOT_HERE}:50050 cannot be listened on: "),
        (f"--http-port 1 --set gateway.host={NOT_HERE}", f"--set gateway.host: {NOT_HERE}:1 cannot be listened on: "),
        ("--port PORT", "--port: 127.0.0.1:PORT is in use"),
        ("-p PORT", "-p: 127.0.0.1:PORT is in use"),
        ("--metrics-port 99999", "--metrics-port: should be from 1 to 65533, since target and draft"),
        ("--metrics-port PORT", "--metrics-port: 127.0.0.1:PORT is in use"),
        ("--http-port 50050", "--http-port: is 50050, as --port is: "),
        ("--ssl-keyfile /k", "--ssl-certfile: is needed together with --ssl-keyfile"),
        ("--gpu-memory-utilization .9 --device cpu", "--gpu-memory-utilization: is set, and no model is on a GPU"),
        ("--set target.device=cpu --set target.gpu_memory_utilization=.5", "--set target.gpu_memory_utilization: is"),
        ("--speculative-config {", "--speculative-config: should be a JSON object"),
        ("-sc []", "-sc: should be an object such as"),
        ("-sc {\"draft_lm_head_quantization\":\"x\"}", "-sc.draft_lm_head_quantization: is not supported; a"),
        ("-sc {\"method\":\"ngram\"} --method suffix", "--method: is 'suffix' here and 'ngram' in -sc; one of them"),
        ("--speculative-config.num_speculative_tokens -1", "--speculative-config.num_speculative_tokens: should be"),
        ("--tokenizer /nope", "--tokenizer: /nope is no folder here, and no id of the Hugging Face Hub"),
        ("--max-model-len 1000000", "--max-model-len: is 1,000,000, and the model takes at most 2,048 tokens"),
        ("--method ngram --spec-model /d", "--spec-model: is /d, and method ngram drafts without a model; one of"),
        ("--optimize=", "--optimize: should be latency or throughput, not empty"),
        ("--optimize speed", "--optimize: should be latency or throughput, not speed"),
        ("--num-coordinators 1000", "--num-coordinators: should be less than or equal to 64, not 1000"),
        ("--set gateway.num_processes=65", "--set gateway.num_processes: should be less than or equal to 64, not"),
        ("--optimize latency --device cpu", "--optimize: chooses where the models run, and --device is set"),
        ("--port 8000", "--port: is 8000, which is HTTP's: --port is gRPC's, and HTTP has --http-port"),
        ("--set draft.port=50050 --method ngram", "--set draft.port: is 50050, as --port is"),
        ("--set target.port=PORT", "--set target.port: 127.0.0.1:PORT is in use"),
        (f"--set target.host={NOT_HERE}", f"--set target.host: {NOT_HERE} cannot be listened on"),
        ("--set foo.bar=1", "--set foo: is not a setting; known are"),
        ("--chat-template chat_template", "--chat-template: chat_template cannot be read: No such file"),
        ("--tokenizer draft.model", "--tokenizer: draft.model is no folder here"),
        ("--kv-cache-bytes 9 --num-gpu-blocks-override 9", "--num-gpu-blocks-override: is set together with --kv-c"),
    ],
)  # fmt: skip
def test_serve_names_the_flag_that_was_typed(model: str, taken: str, words: str, said: str) -> None:
    assert told("serve", model, *words.replace("PORT", taken).split()).startswith(said.replace("PORT", taken))


@pytest.mark.parametrize(
    ("variables", "words", "said"),
    [
        ({"TARGET_KV_CACHE_BYTES": "x"}, "", "OUTRIDER_TARGET_KV_CACHE_BYTES: should be a valid integer"),
        ({"TARGET_NUM_PAGES": "5"}, "--kv-cache-bytes 9", "OUTRIDER_TARGET_NUM_PAGES: is set together with --kv-"),
        ({"COORDINATOR_HOST": NOT_HERE}, "", f"OUTRIDER_COORDINATOR_HOST: {NOT_HERE}:50050 cannot be listened on"),
        ({"COORDINATOR_PORT": "9"}, "--http-port 9", "--http-port: is 9, as OUTRIDER_COORDINATOR_PORT is"),
        ({"SPECULATIVE_CONFIG": "{"}, "", "OUTRIDER_SPECULATIVE_CONFIG: should be a JSON object"),
        ({"TARGET_MAX_MODEL_LEN": "9999"}, "", "OUTRIDER_TARGET_MAX_MODEL_LEN: is 9,999, and the model takes at most"),
    ],
)  # fmt: skip
def test_serve_names_the_variable_that_was_set(model: str, variables: dict[str, str], words: str, said: str) -> None:
    env = {f"OUTRIDER_{name}": value for name, value in variables.items()}
    assert told("serve", model, *words.split(), env=env).startswith(said)


def test_a_name_between_colons_is_no_emoji(model: str) -> None:
    assert "nomod:X:Y" in told("serve", model, "--method", "nomod:X:Y")


def test_serve_names_the_key_of_the_file(model: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("{target: {max_model_len: 9999}}")
    assert told("serve", model, "--config", str(path)).startswith(f"{path}: target.max_model_len: is 9,999, and the")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("-k -3", "-k: must be from 0 to 128, not -3"),
        ("-k-3", "-k: must be from 0 to 128, not -3"),
        ("--num-speculative-tokens -3", "--num-speculative-tokens: must be from 0 to 128, not -3"),
        ("--bad-word=", "--bad-word: must be texts that are not empty"),
        ("--allowed-token-id -1", "--allowed-token-id: must be from 0"),
        ("--min-tokens 5 --max-tokens 3", "--min-tokens: must be at most --max-tokens 3"),
        ("--logit-bias 7", "--logit-bias: should be ID=BIAS"),
        ("-t -1", "-t: must be finite"),
        ("-a foo", "-a: should be host:port with a port from 1 to 65535, or unix:/path, not 'foo'"),
        ("--address http://a:1", "--address: should be host:port of gRPC, such as 127.0.0.1:50050, and no URL"),
    ],
)
def test_generate_names_the_flag_that_was_typed(words: str, said: str) -> None:
    assert told("generate", "x", *words.split()).startswith(said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("serve m -k abc", "Invalid value for -k: should be a valid integer, not 'abc'"),
        ("serve m -kabc", "Invalid value for -k: should be a valid integer, not 'abc'"),
        ("serve m --port=abc", "Invalid value for --port: should be a valid integer, not 'abc'"),
        ("generate x --max-tokens 1.5", "Invalid value for --max-tokens: should be a valid integer, not '1.5'"),
        (
            "generate x --max-tokens 1 --max-tokens 1.5",
            "Invalid value for --max-tokens: should be a valid integer, not '1.5'",
        ),
        ("generate x -t hot", "Invalid value for -t: should be a valid number, not 'hot'"),
        ("demo -k 0", "Invalid value for -k: should be greater than or equal to 1, not '0'"),
        ("serve m --max-model-len 4x", "Invalid value for '--max-model-len': '4x' is no whole number"),
    ],
)
def test_a_value_that_cannot_be_read_is_shown(words: str, said: str) -> None:
    outcome = runner.invoke(app, words.split())
    assert outcome.exit_code == 2
    assert said in outcome.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("demo --device cuda:99", "--device: cuda:99 is set, but there is "),
        ("demo -k 500", "--num-speculative-tokens: should be less"),
        ("demo --acceptance-method foo", "--acceptance-method: should be "),
        ("bench serve MODEL --device cuda:99", "--device: cuda:99 is set, but"),
        ("bench serve MODEL --set target.page_size=0", "--set target.page_size: should be greater"),
        ("trace --demo --html /nope/x.html", "--html: /nope/x.html cannot be written: /nope is no folder"),
        ("serve nope", "target model: nope does not exist; an id of the Hugging Face Hub is OWNER/NAME"),
        ("info --tls-ca-file /nope", "--tls-ca-file: /nope cannot be read"),
    ],
)
def test_other_commands_name_their_flags(model: str, words: str, said: str) -> None:
    assert told(*words.replace("MODEL", model).split()).startswith(said)


def test_clients_name_their_variables_of_tls_and_tokens() -> None:
    assert told("info", env={"OUTRIDER_TLS_CA_FILE": "/nope"}).startswith("OUTRIDER_TLS_CA_FILE: /nope cannot be read")
    said = told("info", "-a", "192.0.2.1:1", env={"OUTRIDER_API_TOKEN": "secret"})
    assert said.startswith("OUTRIDER_API_TOKEN: would go to 192.0.2.1:1 unencrypted")
    assert "(--allow-plaintext-token)" in said


def test_clients_name_their_variable() -> None:
    for command in (["generate", "x"], ["info"]):
        assert told(*command, env={"OUTRIDER_ADDRESS": "foo"}).startswith("OUTRIDER_ADDRESS: should be host:port")


def test_a_setting_without_a_flag_is_named_by_how_it_is_set() -> None:
    names = flag_names({}, Typed(), ()).settings
    assert names["coordinator", "port"] == "--port"
    assert names["gateway", "tls_key_file"] == "--ssl-keyfile"
    assert names["target", "trace_file"] == "--set target.trace_file"


async def test_a_process_that_ends_names_what_was_typed_for_its_flags() -> None:
    environ = {"OUTRIDER_TARGET_DEVICE": "cuda"}
    flags = {("target", "model"): "m", ("target", "num_pages"): 9}
    names = load_all(
        flags, environ=environ, flag_names=flag_names({}, Typed(("--num-gpu-blocks-override",)), flags)
    ).names
    problem = "--device: is cuda, with --num-pages and --max-mixed-prefill-tokens, not --unknown"
    failing = ServiceSpec("target-2", "tests.cli.fake_service", ("--port", "1", "--fail", problem), "", 1.0)
    named = with_typed_names(StackPlan((failing,), ()), names).models[0]
    child = await ChildProcess.start(named, lambda line: None)
    assert await child.wait() == (
        "OUTRIDER_TARGET_DEVICE: is cuda, with --num-gpu-blocks-override and --set target.max_mixed_prefill_tokens,"
        " not --unknown (exit code 1)"
    )


def test_names_are_not_made_up_inside_of_names() -> None:
    names = load_all({("target", "model"): "m"}, flag_names=flag_names({}, Typed(), ()), environ={}).names
    with pytest.raises(ConfigError) as caught, names.in_errors(), names.in_errors():
        raise ConfigError(
            "target.page_size", "see target.num_pages and max_mixed_prefill_tokens, /a/num_pages, 'num_pages'"
        )
    expected = "see --num-gpu-blocks-override and --set target.max_mixed_prefill_tokens, /a/num_pages, 'num_pages'"
    assert str(caught.value) == f"--page-size: {expected}"


def test_the_variable_of_the_sdk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_ADDRESS", "foo")
    with pytest.raises(ConfigError, match=r"^OUTRIDER_ADDRESS: should be host:port"):
        Client()
    with pytest.raises(ConfigError, match=r"^address: should be host:port"):
        Client("bar")


@pytest.mark.parametrize("mode", ["auto", "fixed"])
def test_no_drafts_are_said_to_be_none(mode: str) -> None:
    assert draft_length_text(0, mode) == "none, unless a request asks for some by num_speculative_tokens"
    assert draft_length_text(3, mode).partition("3")[1]


@pytest.mark.parametrize("mode", ["auto", "fixed"])
def test_the_load_that_turns_drafts_off_is_said(mode: str) -> None:
    assert draft_length_text(3, mode, disable_by_batch_size=6).endswith(", with fewer than 6 requests")
    assert draft_length_text(3, mode, disable_by_batch_size=1).startswith("none, since disable_by_batch_size 1 ")
