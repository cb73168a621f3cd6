"""Short messages: those of health, reflection and of methods that take a hash or nothing, read in turns.

gRPC's limit of a message is one for all methods of a server, and far above what these take: megabytes for prompts, and
for rows on links. What is too long is refused once it is there; until then a few are read at the same time.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from outrider.errors import CapacityError
from outrider.transport.malformed import end_stream, only_message, well_formed
from outrider.transport.turns import Turns

MAX_READ_AT_ONCE = 4
"""A short message comes with the first bytes of its call, and is read at once."""
ARRIVAL_TIMEOUT_S = 10.0
"""Time in which a short message has to arrive."""
BUSY_S = 0.05
"""The same, while other calls wait for their turn."""
_RETRY_AFTER_MS = 1000


class ShortMessages:
    """Reads the messages of a server's short methods. Belongs to one event loop."""

    def __init__(self) -> None:
        self._turns = Turns(MAX_READ_AT_ONCE, busy_s=BUSY_S, longest_s=ARRIVAL_TIMEOUT_S, demotes_silent=True)

    async def only(self, requests: AsyncIterator[Any], peer: str) -> Any:  # noqa: ANN401 - messages share no base
        """The message of a call of ``peer``. ``CapacityError`` if it has not arrived when its turn is over,
        ``InvalidRequestError`` for a call without a message or with a malformed one.
        """
        try:
            async with self._turns.taken(peer):
                return await only_message(well_formed(requests))
        except TimeoutError:
            raise CapacityError(
                "the request's message did not arrive in time: send it with the call, and try again",
                retry_after_ms=_RETRY_AFTER_MS,
            ) from None

    async def each(self, requests: AsyncIterator[Any], peer: str) -> AsyncGenerator[Any, None]:
        """The messages of a call that has several, up to its end or its first pause that is too long."""
        received = well_formed(requests)
        try:
            while True:
                async with self._turns.taken(peer):
                    message = await anext(received, None)
                if message is None:
                    return
                yield message
        except TimeoutError:
            return
        finally:
            await end_stream(received)
