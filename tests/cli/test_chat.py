"""`outrider chat`: what is asked, what is kept, and what Ctrl-C does."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.cli.app import app
from outrider.errors import InvalidRequestError
from outrider.generation import TokenizerFiles
from tests.client.conftest import Service

runner = CliRunner()


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    service.generator.tokenizer = TokenizerFiles({"chat_template.jinja": b"{{ messages }}"}, 3, "hash")
    yield service
    service.close()


def conversation(service: Service, index: int) -> list[Any]:
    chat = service.generator.requests[index].chat
    assert chat is not None
    return [(message["role"], message["content"]) for message in chat.messages]


def test_a_conversation_is_kept_until_it_is_begun_anew(service: Service) -> None:
    lines = "one\n\ntwo\n/clear\nthree\n/exit\nfour\n"
    outcome = runner.invoke(app, ["chat", "-a", service.address, "-s", "Be brief.", "--max-tokens", "2"], input=lines)
    assert outcome.exit_code == 0, outcome.output
    assert outcome.stdout == "<0><1>\n" * 3
    system = ("system", "Be brief.")
    assert conversation(service, 0) == [system, ("user", "one")]
    assert conversation(service, 1) == [system, ("user", "one"), ("assistant", "<0><1>"), ("user", "two")]
    assert conversation(service, 2) == [system, ("user", "three")]
    assert service.generator.requests[0].max_tokens == 2 and "temperature" in service.generator.requests[0].defaulted


def test_help_is_shown_and_not_sent(service: Service) -> None:
    outcome = runner.invoke(app, ["chat", "-a", service.address, "--max-tokens", "1"], input="/help\none\n")
    assert outcome.stdout == "<0>\n"
    assert "/clear begins anew" in outcome.stderr
    assert conversation(service, 0) == [("user", "one")]


def test_the_first_message_may_be_an_argument(service: Service) -> None:
    outcome = runner.invoke(app, ["chat", "hello", "-a", service.address, "--max-tokens", "1", "-t", "0"], input="")
    assert outcome.stdout == "<0>\n"
    assert conversation(service, 0) == [("user", "hello")]
    assert service.generator.requests[0].sampling.temperature == 0


def test_an_error_is_one_line(service: Service) -> None:
    service.generator.error = InvalidRequestError("messages", "cannot be used, since the model has no chat template")
    outcome = runner.invoke(app, ["chat", "hello", "-a", service.address], input="")
    assert outcome.exit_code == 1
    assert outcome.stderr == "error: messages: cannot be used, since the model has no chat template\n"


@pytest.mark.parametrize("given", ["", "hello\n"])
def test_a_model_without_a_chat_template_is_told_before_a_message_is_asked_for(service: Service, given: str) -> None:
    service.generator.tokenizer = TokenizerFiles({"tokenizer_config.json": b'{"bos_token": "<s>"}'}, 3, "hash")
    outcome = runner.invoke(app, ["chat", "-a", service.address], input=given)
    assert outcome.exit_code == 1 and service.generator.num_asked == 0
    assert "the model has no chat template: serve it with --chat-template FILE" in outcome.stderr
    service.generator.tokenizer = TokenizerFiles({"tokenizer_config.json": b'{"chat_template": "x"}'}, 3, "hash")
    assert runner.invoke(app, ["chat", "-a", service.address], input="").exit_code == 0


# A shell's background job ignores SIGINT, and its children would too. With a function between fork and exec Python
# forks, and gRPC's handlers run beside its threads.
_INTERRUPTIBLE = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("outrider.cli", run_name="__main__", alter_sys=True)
"""


def test_ctrl_c_stops_the_answer_alone(service: Service) -> None:
    service.generator.stop_after = 2
    command = [sys.executable, "-u", "-c", _INTERRUPTIBLE, "chat", "-a", service.address, "--max-tokens", "3"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process: Any = subprocess.Popen(command, text=True, **pipes)
    try:
        process.stdin.write("one\n")
        process.stdin.flush()
        if (said := process.stdout.read(6)) != "<0><1>":
            pytest.fail(f"the chat said {said!r}, and then: {process.communicate(timeout=240)}")
        process.send_signal(signal.SIGINT)
        service.until(num_abandoned=1)
        service.generator.stop_after = None
        out, err = process.communicate("two\n", timeout=240)
        assert process.returncode == 0, err
        assert out == "<0><1><2>\n" and "(stopped)" in err
        assert conversation(service, 1) == [("user", "one"), ("assistant", "<0><1>"), ("user", "two")]
    finally:
        process.kill()
        process.wait()
