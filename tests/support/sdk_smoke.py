"""Calls of an installed SDK to the scripted server at OUTRIDER_ADDRESS; imports nothing but the SDK."""

from __future__ import annotations

import asyncio
import sys

import google.protobuf

from outrider import AsyncClient, Client, InvalidRequestError


def check_blocking() -> None:
    with Client() as client:
        assert client.generate("x", max_tokens=3).usage.completion_tokens == 3
        assert len(client.generate(["a", "b"], n=2, max_tokens=3)) == 4
        assert list(client.stream("x", max_tokens=3))[-1].result is not None
        assert client.model_info().target_model == "scripted"
        try:
            client.generate("x", temperature=-1)
        except InvalidRequestError as error:
            assert error.field == "temperature"
        else:
            raise AssertionError("a wrong temperature was taken")


async def check_asyncio() -> None:
    async with AsyncClient() as client:
        assert (await client.generate("x", max_tokens=2)).text


if __name__ == "__main__":
    check_blocking()
    asyncio.run(check_asyncio())
    sys.stdout.write(f"the SDK works on Python {sys.version.split()[0]} with protobuf {google.protobuf.__version__}\n")
