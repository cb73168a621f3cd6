"""`outrider serve` and `outrider gateway` as real processes: OpenAI's API, keys, pages, restarts, draining."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from outrider import Client
from outrider.cli.stack.held_ports import hold_port
from tests.end_to_end.commands import DEADLINE_S, PATIENT, Command, wait_until
from tests.support.tiny_models import EOS_TOKEN

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}<assistant>"
MESSAGES: Any = [{"role": "user", "content": "Hello"}]
LONG: Any = {"model": "tiny", "prompt": [72, 101, 108], "max_tokens": 2000, "temperature": 0}
LONG["extra_body"] = {"ignore_eos": True}


class Served:
    """The command, and where its gateway is."""

    def __init__(self, model: Path, tokens: Path) -> None:
        self.http_port, self.metrics_port, self.tokens = hold_port(), hold_port(), tokens
        flags = ("--draft-model", str(model), "-k", "3", "--served-model-name", "tiny", "--api-key", "the-key")
        fixed = ("--set", "coordinator.draft_length=fixed", "--set", "target.num_pages=600")
        patient = (*PATIENT, "--set", "gateway.resume_timeout_s=240")  # a coordinator takes its time to start again
        metrics = ("--set", f"coordinator.metrics_port={self.metrics_port}")
        self.command = Command(str(model), *flags, *fixed, *patient, *metrics, http_port=self.http_port)
        self.address = self.command.attached(token="the-key")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def openai(self, **more: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="the-key", max_retries=0, **more)

    def client(self) -> Client:
        return Client(self.address, token="the-key")

    def num_cancelled(self) -> float:
        """Requests that their clients left, as the coordinator counts them."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=120) as answer:
            found = re.search(r'outrider_requests_total\{outcome="cancelled"[^}]*\} (\S+)', answer.read().decode())
        assert found is not None
        return float(found[1])


@pytest.fixture(scope="module")
def served(tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    model = shutil.copytree(tiny_pair[0], folder / "chatty")
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS_TOKEN}))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    tokens = folder / "keys"
    tokens.write_text("the-key\n")
    served = Served(model, tokens)
    yield served
    served.command.close()


def test_http_gives_what_grpc_gives(served: Served) -> None:
    with served.client() as client, served.openai() as http:
        wanted = client.generate(prompt="Hello", max_tokens=24, temperature=0, logprobs=2, prompt_logprobs=1)
        found = http.completions.create(model="tiny", prompt="Hello", max_tokens=24, temperature=0, logprobs=2)
        assert found.choices[0].text == wanted.text and found.usage is not None
        assert found.usage.completion_tokens == wanted.usage.completion_tokens
        logprobs = found.choices[0].logprobs
        assert logprobs is not None and wanted.logprobs is not None
        assert logprobs.token_logprobs == pytest.approx([entry.logprob for entry in wanted.logprobs], abs=1e-4)
        details = found.usage.completion_tokens_details
        assert details is not None and (details.accepted_prediction_tokens or 0) > 0
        echoed = http.completions.create(model="tiny", prompt="Hello", max_tokens=0, echo=True, logprobs=1)
        told = echoed.choices[0].logprobs
        assert told is not None and told.token_logprobs is not None and wanted.prompt_logprobs is not None
        expected = [None if entry is None else entry.logprob for entry in wanted.prompt_logprobs]
        assert told.token_logprobs[0] is None
        assert told.token_logprobs[1:] == pytest.approx(expected[1:], abs=1e-4)
        drawn = {"max_tokens": 24, "temperature": 1.0, "seed": 7}
        assert client.chat(MESSAGES, **drawn).text == "".join(
            chunk.choices[0].delta.content or ""
            for chunk in http.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, **drawn)
        )
        first, second = http.completions.create(model="tiny", prompt="Hello", n=2, **drawn).choices
        assert first.text == client.generate(prompt="Hello", **drawn).text != second.text


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_pages(served: Served, stream: bool) -> None:
    with served.client() as client:

        def pages_free() -> int:
            """Free pages as the target reports with its next answer."""
            client.generate(prompt_token_ids=[1, 2], max_tokens=2)
            return client.model_info().target_pages_free

        free, num_cancelled = pages_free(), served.num_cancelled()
        body = {**LONG, **LONG["extra_body"], "n": 2, "stream": stream}
        del body["extra_body"]
        connection = http.client.HTTPConnection("127.0.0.1", served.http_port, timeout=120)
        with contextlib.closing(connection):
            headers = {"content-type": "application/json", "authorization": "Bearer the-key"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            wait_until(lambda: client.model_info().num_running == 2, "both choices run", served.command.err)
            if stream:
                assert connection.getresponse().readline().startswith(b"data: ")
            assert pages_free() < free
        wait_until(lambda: client.model_info().num_running == 0, "no request runs", served.command.err)
        # They were ended; they did not come to their own end.
        wait_until(lambda: served.num_cancelled() == num_cancelled + 2, "both are cancelled", served.command.err)
        assert pages_free() == free


def test_keys_are_asked_for_over_http_too(served: Served) -> None:
    stranger = OpenAI(base_url=f"{served.url}/v1", api_key="wrong", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    with urllib.request.urlopen(f"{served.url}/health", timeout=120) as answer:
        assert answer.status == 200


def test_a_stream_outlives_the_coordinator(served: Served) -> None:
    with served.openai() as http:
        plain = http.completions.create(**LONG).choices[0].text
        before = served.command.children()["outrider_coordinator"]
        stream = http.completions.create(**LONG, stream=True)
        texts = [next(stream).choices[0].text]
        os.kill(before, signal.SIGKILL)
        texts += [chunk.choices[0].text for chunk in stream]
        assert "".join(texts) == plain


def test_gateways_by_themselves_share_a_port_and_have_metrics(served: Served) -> None:
    port, metrics_ports = hold_port(), [hold_port(), hold_port()]
    command = [sys.executable, "-m", "outrider.cli", "gateway", "--coordinator", served.address, "--port", str(port)]
    command += ["--reuse-port", "--api-token-file", str(served.tokens), "--drain-delay-s", "0"]
    command += ["--served-model-name", "tiny", "--metrics-port"]
    gateways = [subprocess.Popen([*command, str(own)], stderr=subprocess.PIPE, text=True) for own in metrics_ports]
    try:
        for gateway in gateways:
            # One that is still starting would be ended by the signal below, and not by itself.
            assert gateway.stderr is not None and any("listening on" in line for line in gateway.stderr)
        with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="the-key", max_retries=0) as http:
            wait_until(lambda: _is_up(f"http://127.0.0.1:{port}/health"), "health")
            assert http.completions.create(model="tiny", prompt="Hello", max_tokens=3).usage is not None
        read = [urllib.request.urlopen(f"http://127.0.0.1:{own}/metrics").read().decode() for own in metrics_ports]
        assert all(
            re.search(r'outrider_build_info\{.*model="tiny",role="gateway"|role="gateway".*model="tiny"', text)
            for text in read
        )
        assert (
            sum(text.count('outrider_http_requests_total{path="/v1/completions",status="200"} 1.0') for text in read)
            == 1
        )
        for gateway in gateways:
            gateway.terminate()
            assert gateway.wait(DEADLINE_S) == 0
    finally:
        for gateway in gateways:
            gateway.kill()
            gateway.communicate()


def test_sigterm_lets_a_stream_finish(served: Served) -> None:
    with served.openai() as http:
        stream = http.completions.create(**LONG, stream=True)
        texts = [next(stream).choices[0].text]
        served.command.terminate()
        wait_until(lambda: not _is_up(f"{served.url}/health"), "no more connections")
        chunks = list(stream)
        assert chunks[-1].choices[0].finish_reason == "length"
        assert len(texts) + len(chunks) > 1
    assert served.command.wait()[0] == 0


def _is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=120) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
