"""`outrider serve` with real services on tiny models, as a user starts it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outrider import Client
from tests.support.tiny_models import cached_tiny_model

DEADLINE_S = 90.0
PROMPT = [1, 2, 3, 4]


class Serve:
    """The command running; what it writes is read as it comes."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "outrider.cli",
                "serve",
                *arguments,
                "--port",
                str(_free_port()),
                "--num-threads",
                "1",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.out: list[str] = []
        self.err: list[str] = []
        for stream, lines in ((self.process.stdout, self.out), (self.process.stderr, self.err)):
            threading.Thread(target=lambda stream=stream, lines=lines: lines.extend(stream or ()), daemon=True).start()

    def address(self) -> str:
        """Where it serves, once it says so."""
        wait_until(lambda: bool(self.out) or self.process.poll() is not None, self.err)
        found = re.fullmatch(r"Outrider is ready at (\S+)\n", self.out[0]) if self.out else None
        assert found, (self.out, self.err)
        return found[1]

    def children(self) -> dict[str, int]:
        """The services' processes by module."""
        found = {}
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == self.process.pid:
                    words = (folder / "cmdline").read_text().split("\0")
                    found[words[words.index("outrider.cli.stack.child") + 2]] = int(folder.name)
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def wait_until(condition: Callable[[], bool], said: list[str] | None = None) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, said
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except OSError:
        return False


def _free_port() -> int:
    from outrider.cli.stack.preflight import free_port

    return free_port()


@pytest.fixture(scope="module")
def models() -> tuple[str, str]:
    return str(cached_tiny_model(seed=1)), str(cached_tiny_model(seed=2))


@pytest.fixture(scope="module")
def serve(models: tuple[str, str]) -> Iterator[Serve]:
    running = Serve(models[0], "--draft-model", models[1], "-k", "3", "-v")
    yield running
    running.close()


def greedy(client: Client, *, num_speculative_tokens: int | None = None) -> tuple[int, ...]:
    return client.generate(
        prompt_token_ids=PROMPT,
        max_tokens=24,
        temperature=0,
        ignore_eos=True,
        num_speculative_tokens=num_speculative_tokens,
    ).token_ids


def test_it_says_where_it_serves_in_one_line_and_serves(serve: Serve) -> None:
    with Client(serve.address()) as client:
        info = client.model_info()
        assert info.num_speculative_tokens == 3
        assert info.draft_attached
        assert greedy(client) == greedy(client, num_speculative_tokens=0)
    assert len(serve.out) == 1
    assert any("pages of 16 tokens" in line for line in serve.err)


def test_generate_and_info_on_the_command_line(serve: Serve) -> None:
    command = [sys.executable, "-m", "outrider.cli"]
    options = ["--address", serve.address()]
    generate = subprocess.run(
        [*command, "generate", "ab", "--max-tokens", "8", "-t", "0", "--ignore-eos", "--stats", *options],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    assert generate.stdout.endswith("\n")
    for name in ("time to first token", "acceptance", "mean acceptance length", "in draft", "in target", "on the wire"):
        assert name in generate.stderr
    info = subprocess.run([*command, "info", *options], capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert re.search(r"num_speculative_tokens +3", info.stdout)


def test_a_killed_draft_is_started_again_and_users_see_nothing(serve: Serve) -> None:
    with Client(serve.address()) as client:
        expected = greedy(client, num_speculative_tokens=0)
        before = serve.children()["draft_service"]
        os.kill(before, signal.SIGKILL)
        assert greedy(client) == expected
        wait_until(lambda: serve.children().get("draft_service", before) != before, serve.err)
        wait_until(lambda: client.model_info().draft_attached, serve.err)
        assert greedy(client) == expected


def test_sigterm_stops_everything_with_exit_code_0(serve: Serve) -> None:
    serve.address()
    children = serve.children()
    assert set(children) == {"draft_service", "target_service", "coordinator"}
    serve.process.send_signal(signal.SIGTERM)
    assert serve.process.wait(DEADLINE_S) == 0, serve.err
    assert not any(is_alive(pid) for pid in children.values())


def test_kill_leaves_no_child_behind(models: tuple[str, str]) -> None:
    running = Serve(models[0])
    try:
        running.address()
        children = running.children()
        assert set(children) == {"target_service", "coordinator"}
    finally:
        running.close()
    wait_until(lambda: not any(is_alive(pid) for pid in children.values()))


def test_a_model_that_cannot_be_loaded_is_a_clear_error(models: tuple[str, str], tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in Path(models[0]).iterdir():
        content = file.read_bytes()
        (broken / file.name).write_bytes(content[: len(content) // 2] if file.suffix == ".safetensors" else content)
    running = Serve(str(broken), "--draft-model", models[1])
    assert running.process.wait(DEADLINE_S) == 1
    wait_until(lambda: any(line.startswith("error: ") for line in running.err))
    (line,) = [line for line in running.err if line.startswith("error: ")]
    assert "the target service did not start" in line
    assert "safetensors" in line
    assert running.out == []
