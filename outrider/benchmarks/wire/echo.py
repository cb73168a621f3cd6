"""The other process: `python -m outrider.benchmarks.wire.echo ADDRESS` answers with the bytes that a request asks for.

Prints the address once it listens and ends when its standard input does, so that it never outlives who started it.
"""

from __future__ import annotations

import argparse
import asyncio
import struct
import sys
from collections.abc import AsyncIterator

import grpc
import uvloop

from outrider.transport.channels import MAX_LINK_MESSAGE_BYTES, message_limits

SERVICE = "outrider.benchmarks.Echo"
_HEADER = struct.Struct("<Q")
HEADER_BYTES = _HEADER.size


def make_request(num_bytes: int, reply_bytes: int) -> bytes:
    """A request of at least `HEADER_BYTES`, filled up with a pattern."""
    body = (bytes(range(256)) * (num_bytes // 256 + 1))[: max(0, num_bytes - HEADER_BYTES)]
    return _HEADER.pack(reply_bytes) + body


def reply_to(request: bytes) -> bytes:
    """Reply of the length that the request asks for: its last bytes, repeated if it is shorter."""
    wanted: int = _HEADER.unpack_from(request)[0]
    if not wanted:
        return b""
    return (request * (wanted // len(request) + 1))[-wanted:]


async def _unary(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
    return reply_to(request)


async def _stream(
    requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
) -> AsyncIterator[bytes]:
    async for request in requests:
        yield reply_to(request)


async def serve(address: str) -> None:
    """Listen at `host:port` (0: any) or `unix:/path` until standard input ends."""
    server = grpc.aio.server(options=[*message_limits(MAX_LINK_MESSAGE_BYTES), ("grpc.so_reuseport", 0)])
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "Unary": grpc.unary_unary_rpc_method_handler(_unary),
        "Stream": grpc.stream_stream_rpc_method_handler(_stream),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port(address)
    await server.start()
    print(address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)
    await server.stop(None)


def main() -> None:
    """The process."""
    parser = argparse.ArgumentParser(prog="python -m outrider.benchmarks.wire.echo", description=__doc__)
    parser.add_argument("address")
    uvloop.run(serve(parser.parse_args().address))


if __name__ == "__main__":
    main()
