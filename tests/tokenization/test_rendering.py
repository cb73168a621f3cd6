"""Chats in processes with limits: whatever a template does, it ends, and other chats are rendered."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from outrider.chat import ChatPrompt
from outrider.errors import InvalidRequestError
from outrider.tokenization.chat import ChatRenderer, ChatRendering, rendering_process
from outrider.tokenization.chat.templates import ChatTemplates
from tests.support.processes import children

MANY = "{% for a in range(90000) %}"
LOOPS = [
    f"{MANY * 4}{{% set x = a %}}{'{% endfor %}' * 4}",
    "{% set ns = namespace(x=2) %}{% for a in range(90000) %}{% set ns.x = ns.x ** 2 %}{% endfor %}",
    "{{ 7 ** (7 ** 30) }}",
    "{% set ns = namespace(l=[1]) %}{% for a in range(90) %}{% set ns.l = ns.l + ns.l %}{% endfor %}",
    "{{ range(90000) | map('string') | map('replace', '', 'x' * 90000) | list | length }}",
    "{% macro f(n) %}{% for a in range(90) %}{{ f(n + 1) if n < 90 }}{% endfor %}{% endmacro %}{{ f(0) | length }}",
    "{% for a in range(90000) %}{{ messages | tojson | length }}{{ range(90000) | sum }}{% endfor %}",
    "{% for a in range(90000) recursive %}{{ loop(range(90000)) }}{% endfor %}",
]
BOMBS = [
    "{{ 'a' * 10 ** 9 }}",
    "{{ 'a' * 10 ** 12 }}",
    "{{ 'a' | center(2 * 10 ** 9) }}",
    "{{ '%2000000000d' | format(1) }}",
    "{{ '{:>2000000000}'.format(1) }}",
    "{{ 'a'.ljust(2000000000) }}",
    "{{ ('a' * 9000000).replace('a', 'a' * 9000) }}",
    "{{ [0] * 10 ** 9 }}",
    "{{ ('x' * 90000000) | wordwrap(1) }}",
    "{{ 'a' | indent(10 ** 10) }}",
    "{{ dict.fromkeys(range(90000), 'x' * 90000) }}",
    "{% for a in range(90000) %}{{ 'x' * 90000 }}{% endfor %}",
    "{% set ns = namespace(s='x') %}{% for a in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
    "{{ range(10 ** 9) | list }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ ('[' * 100000) | tojson | pprint | urlize }}{{ 'x' * 3000000 }}",
]
ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__']['__mro__'] }}",
    "{{ (''|attr('__class__')) | string }}<class",
    "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.environ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['datetime'].sys }}",
    "{{ '{0.__class__.__base__}'.format('') }}",
    "{{ '{x.__class__}'.format_map({'x': 1}) }}",
    "{% include '/etc/passwd' %}",
    "{% import '/etc/passwd' as x %}{{ x }}",
    "{% extends '/etc/passwd' %}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{{ messages.__class__ }}{{ messages.append({}) }}",
]
CHAT = ChatPrompt(({"role": "user", "content": "hi"},))
GOOD = "{{ messages[0].content }}"


@pytest.fixture(autouse=True)
def _less_time(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = "p.PROCESSOR_S, p.MEMORY_BYTES = 0.3, 1 << 28"
    start = "import sys; sys.path[:] = {path!r}; from outrider.tokenization.chat import rendering_process as p; "
    monkeypatch.setattr("outrider.tokenization.chat.rendering.MAIN", f"{start}{limits}; p.main()")


def rendering(**sources: str) -> ChatRendering:
    return ChatRendering(ChatRenderer(ChatTemplates(sources)))


@pytest.fixture
async def others() -> AsyncIterator[None]:
    """Another user of the event loop, which is never held up."""
    longest, ended = 0.0, False

    async def tick() -> None:
        nonlocal longest
        loop = asyncio.get_running_loop()
        while not ended:
            began = loop.time()
            await asyncio.sleep(0.005)
            longest = max(longest, loop.time() - began)

    ticking = asyncio.create_task(tick())
    yield
    ended = True
    await ticking
    assert longest < 20.0  # nothing but a template itself takes as long on a busy machine


@pytest.mark.parametrize("sources", [LOOPS, BOMBS], ids=["loops", "bombs"])
async def test_a_template_that_does_not_end_is_an_error(others: None, sources: list[str]) -> None:
    named = {str(number): source for number, source in enumerate(sources)}
    made = rendering(default=GOOD, **named)

    async def render(name: str) -> str:
        with pytest.raises(InvalidRequestError, match=r"chat template|characters") as raised:
            await made.render(ChatPrompt(CHAT.messages, chat_template=name))
        return raised.value.field

    assert set(await asyncio.gather(*map(render, named))) == {"messages"}
    assert await made.render(CHAT) == "hi"


async def test_the_error_of_a_loop_names_the_template() -> None:
    made = rendering(wild=LOOPS[0])
    with pytest.raises(InvalidRequestError, match=r"by the chat template wild: it takes more than"):
        await made.render(ChatPrompt(CHAT.messages, chat_template="wild"))


async def test_a_template_reaches_nothing_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_SECRET", "of this process")
    made = rendering(**{str(number): source for number, source in enumerate(ESCAPES)})
    for number in range(len(ESCAPES)):
        try:
            text = await made.render(ChatPrompt(CHAT.messages, chat_template=str(number)))
        except InvalidRequestError as error:
            text = str(error)
        assert "of this process" not in text and "root:" not in text and "uid=" not in text
        assert "<class '" not in text and "<module" not in text


async def test_chats_are_rendered_as_in_this_process_and_beside_one_that_loops() -> None:
    made = rendering(default=GOOD, wild=LOOPS[0])
    looping = asyncio.create_task(made.render(ChatPrompt(CHAT.messages, chat_template="wild")))
    texts = ["hi", "é漢\U0001f600", "a" * 1_000_000]
    chats = [ChatPrompt(({"role": "user", "content": text},)) for text in texts]
    assert [await made.render(chat) for chat in chats] == texts
    with pytest.raises(InvalidRequestError):
        await looping


async def test_chats_whose_clients_are_gone_are_not_rendered_to_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    made = rendering(default=GOOD, wild=LOOPS[0])
    chats = [asyncio.create_task(made.render(ChatPrompt(CHAT.messages, chat_template="wild"))) for _ in range(6)]
    async with asyncio.timeout(240):
        while len(started) < 2:
            await asyncio.sleep(0.001)
        for chat in chats:
            chat.cancel()
        assert {type(error) for error in await asyncio.gather(*chats, return_exceptions=True)} == {
            asyncio.CancelledError
        }
        assert await made.render(CHAT) == "hi"
        while [process.returncode for process in started[:2]] != [-signal.SIGKILL] * 2:
            await asyncio.sleep(0.001)
    assert len(started) == 3, "chats that had not begun start no process"


async def test_errors_are_those_of_this_process() -> None:
    made = rendering(default="{{ raise_exception('no\\nsuch role') }}")
    with pytest.raises(InvalidRequestError, match=r"messages: are refused by the chat template default: no\nsuch role"):
        await made.render(CHAT)
    with pytest.raises(InvalidRequestError, match="must name one of the model's templates"):
        await made.render(ChatPrompt(CHAT.messages, chat_template="other"))


async def test_the_process_knows_no_variables_and_ends_with_its_owner() -> None:
    before, made = children(os.getpid()), rendering(default=GOOD)
    assert await made.render(CHAT) == "hi"
    (child,) = children(os.getpid()) - before
    assert b"OUTRIDER" not in Path(f"/proc/{child}/environ").read_bytes()
    assert {path.name for path in Path(f"/proc/{child}/fd").iterdir()} <= {"0", "1", "2"}
    del made
    async with asyncio.timeout(240):
        while child in children(os.getpid()):
            await asyncio.sleep(0.01)


def test_limits_leave_room_for_the_longest_chats() -> None:
    assert rendering_process.PROCESSOR_S >= 1
