"""Other clients of the HTTP API against the embedded pair, each in an environment of its own (``make clients``)."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.gateway.conftest import Gateway
from tests.support.stack import run_stack

ROOT = Path(__file__).parents[2]
PAIR = ROOT / "outrider" / "demo" / "pair"
INSTALLED, SCRIPTS = ROOT / ".venv-clients", ROOT / "tests" / "clients"
TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not (INSTALLED / ".installed").exists() and "CI" not in os.environ, reason="make clients"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(TEMPLATE)
    async with run_stack(PAIR / "target", PAIR / "draft", wire=True, chat_template=str(template)) as stack:
        gateway = Gateway(stack.addresses["coordinator"], names=("target",))
        try:
            yield gateway.url
        finally:
            await asyncio.to_thread(gateway.close)


async def run(*command: str) -> None:
    found = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=240, check=False)
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-4000:]


@pytest.mark.parametrize("name", ("instructor", "langchain", "litellm"))
async def test_a_client_gets_structured_output_and_calls(url: str, name: str) -> None:
    await run(str(INSTALLED / "bin" / "python"), str(SCRIPTS / f"with_{name}.py"), url)


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
async def test_the_client_for_javascript(url: str) -> None:
    await run("node", str(SCRIPTS / "with_openai.mjs"), url, str(INSTALLED))
