"""What the clients of the explorer may hold together: connections, time, and bytes that are on their way."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from vbcaps.explore.pictures import Refused

MOST_CONNECTIONS = 256
MOST_UPLOADS = 4  # that are received and decoded at a time; others wait
PATIENCE = 10.0  # seconds in which a request must have come whole


class Connection(H11Protocol):
    """A connection that ends where there are too many, or where the head of its request does not come in time."""

    _since: float | None = None  # when the wait for the rest of a head began

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
            return
        self._since = self.loop.time()
        self.loop.call_later(PATIENCE, self._look)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        answering = self.cycle is not None and not self.cycle.response_complete
        self._since = None if answering else self._since or self.loop.time()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:  # the rest of a body that was refused
            self.transport.close()
        answering = self.cycle is not None and not self.cycle.response_complete  # a request that waited behind
        self._since = None if answering else self.loop.time()

    def _look(self) -> None:
        if self.transport.is_closing():
            return
        late = self._since is not None and self.loop.time() - self._since >= PATIENCE
        if late:
            self.transport.abort()
        else:
            self.loop.call_later(PATIENCE / 2, self._look)


@asynccontextmanager
async def in_time() -> AsyncIterator[None]:
    """Refuse a request whose body does not come whole in time."""
    try:
        async with asyncio.timeout(PATIENCE):
            yield
    except TimeoutError as error:
        raise Refused(f"the request did not come whole within {PATIENCE:g} s", 408) from error


class Slots:
    """The uploads that are received and decoded at the same time."""

    def __init__(self) -> None:
        self.free = asyncio.Semaphore(MOST_UPLOADS)

    @asynccontextmanager
    async def take(self) -> AsyncIterator[None]:
        """Wait for a slot; after some seconds the request is refused."""
        try:
            async with asyncio.timeout(PATIENCE):
                await self.free.acquire()
        except TimeoutError as error:
            raise Refused("the explorer is busy with other uploads: try again", 503) from error
        try:
            yield
        finally:
            self.free.release()
