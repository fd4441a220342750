"""Limits on connections before they carry a request: their number, and the time for headers."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

STANDSTILL_S = 0.5  # a timer later than this means that the event loop was blocked or the process suspended
BUSY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Connections:
    """The open connections, at most `limit` in all and `client_limit` per address. A request's headers must be complete
    `header_timeout` seconds after they began, or after the connection was made."""

    def __init__(self, limit: int, client_limit: int, header_timeout: float):
        self._limit = limit
        self._client_limit = client_limit
        self.header_timeout = header_timeout
        self._open: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._open.total()

    def add(self, address: str) -> bool:
        """Count a new connection, if there is room. Return whether there was."""
        if len(self) >= self._limit or self._open[address] >= self._client_limit:
            return False
        self._open[address] += 1
        return True

    def remove(self, address: str) -> None:
        self._open[address] -= 1
        if not self._open[address]:
            del self._open[address]

    def protocol(self, **settings: Any) -> BoundedProtocol:
        """Return the protocol for a new connection: a factory for uvicorn."""
        return BoundedProtocol(self, **settings)


class BoundedProtocol(H11Protocol):
    """Uvicorn's protocol for one of the `Connections`."""

    def __init__(self, all_connections: Connections, **settings: Any):
        super().__init__(**settings)
        self._all = all_connections
        self._address = ""
        self._is_counted = False
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        self._is_counted = self._all.add(self._address)
        if self._is_counted:
            self._await_headers()
        else:
            transport.write(BUSY)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_waiting()
        if self._is_counted:
            self._is_counted = False
            self._all.remove(self._address)

    def data_received(self, data: bytes) -> None:
        if not self._is_counted:
            return
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            self._stop_waiting()  # the data was the rest of a rejected request's body
            self._wait_for_another()
        else:
            self._await_headers()

    def _wait_for_another(self) -> None:
        """Restart uvicorn's keep-alive timer."""
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _await_headers(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(self._all.header_timeout, self._give_up)

    def _stop_waiting(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _give_up(self) -> None:
        """Close the connection. If the timer is late, this process may have been suspended: restart the timer
        instead."""
        assert self._header_timer is not None
        late = self.loop.time() - self._header_timer.when()
        self._header_timer = None
        if late > STANDSTILL_S:
            self._await_headers()
        elif self.cycle is None or self.cycle.response_complete:
            self.transport.close()
