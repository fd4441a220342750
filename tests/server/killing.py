"""A real server whose processes are killed under load. Only requests that a kill has cut off may stay without an
answer."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

import httpx
from test_faults import Server


class Cut(Exception):
    """What ran when a process was killed has no answer."""


class KilledServer:
    """Clients ask through it: while a process is down they wait."""

    def __init__(self, *flags: str):
        self._flags = flags
        self._server = Server(*flags, stderr=None)
        self.url = self._server.url
        self._gate = asyncio.Event()
        self.open()
        self.kills = 0  # of either process
        self.engine_kills = 0  # since the server was started
        self.on_start: Callable[[], Awaitable[None]] | None = None  # after a kill, before clients may ask
        limits = httpx.Limits(max_connections=200, max_keepalive_connections=0)
        self.client = httpx.AsyncClient(base_url=self.url, timeout=120, limits=limits)

    def open(self) -> None:
        """Clients may ask."""
        self._gate.set()

    def close(self) -> None:
        self._gate.clear()

    async def _open_again(self) -> None:
        if self.on_start is not None:
            await self.on_start()
        self.open()

    async def opened(self) -> int:
        """Wait until clients may ask -> the kills so far."""
        while not self._gate.is_set():  # it may be closed again before those who wait are awake
            await self._gate.wait()
        return self.kills

    async def ask(
        self, path: str, body: dict | None = None, method: str = "POST", statuses: tuple[int, ...] = (200,), **query
    ) -> httpx.Response:
        """Once the server is open. Raises Cut if a process was killed before the answer was there."""
        kills = await self.opened()
        try:
            answer = await self.client.request(method, path, json=body, params=query)
        except httpx.TransportError:
            if kills == self.kills:
                raise
            raise Cut from None
        if answer.status_code == 503 and kills != self.kills:
            raise Cut
        assert answer.status_code in statuses, f"{path} {body}: {answer.status_code} {answer.text}"
        return answer

    async def get(self, path: str, **query):
        return (await self.ask(path, method="GET", **query)).json()

    async def metrics(self) -> dict[str, float]:
        """By name, those with labels of their own with the last of them."""
        lines = (await self.client.get("/metrics")).text.splitlines()
        return {line.partition("{")[0]: float(line.split()[-1]) for line in lines if not line.startswith("#")}

    async def kill_engine(self) -> None:
        """Until another one serves."""
        self.close()
        self.kills += 1
        self.engine_kills += 1
        os.kill(self._server.engine(), signal.SIGKILL)
        while not await self._is_started_again():
            await asyncio.sleep(0.1)
        await self._open_again()

    async def _is_started_again(self) -> bool:
        restarts = (await self.metrics())["freehold_engine_restarts_total"]
        assert restarts <= self.engine_kills, "an engine was lost"
        return restarts == self.engine_kills and (await self.client.get("/health")).status_code == 200

    async def kill_server(self) -> None:
        """The engine ends with it. Until another one serves."""
        self.close()
        self.kills += 1
        self.engine_kills = 0
        self._server.process.kill()
        self._server.process.wait()
        self._server = await asyncio.to_thread(Server, *self._flags, stderr=None, port=self._server.port)
        await self._open_again()

    def end(self) -> None:
        assert self._server.end(60) == 0

    def destroy(self) -> None:
        """In case that something went wrong."""
        if self._server.process.poll() is None:
            os.killpg(self._server.process.pid, signal.SIGKILL)
