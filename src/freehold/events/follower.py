"""Follows the events of a publisher on this machine."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import zmq
import zmq.asyncio

from freehold.events.config import EventsConfig, binds
from freehold.events.wire import END, EventBatch, decode, numbered

REPLAY_TIMEOUT_MS = 5000

Numbered = tuple[int, EventBatch]


class Follower:
    """Yields numbered batches, in order, from the next one on. With `since`, kept batches from that number on come
    first. Raises ValueError if the publisher does not bind its endpoint, or keeps nothing."""

    def __init__(self, config: EventsConfig, since: int | None = None):
        if not binds(config.endpoint):
            raise ValueError(f"the events are sent to {config.endpoint}: follow them there")
        if since is not None and config.replay_endpoint is None:
            raise ValueError("past events are not kept: start with a replay_endpoint in --kv-events-config")
        self._config = config
        self._since = since
        self._context = zmq.asyncio.Context()
        self._live = self._context.socket(zmq.SUB)
        self._live.set_hwm(config.hwm)
        self._live.subscribe(config.topic)
        self._live.connect(_here(config.endpoint))

    async def batches(self, idle_ms: int) -> AsyncGenerator[Numbered | None]:
        """Yield batches, and None after each `idle_ms` without one."""
        following = 0
        if self._since is not None:
            following = self._since
            async for number, batch in self._missed(self._since):
                following = number + 1
                yield number, batch
        while True:
            if not await self._live.poll(idle_ms):
                yield None
                continue
            _, number, payload = await self._live.recv_multipart()
            if int.from_bytes(number, "big") >= following:
                yield int.from_bytes(number, "big"), decode(payload)

    async def _missed(self, first: int) -> AsyncGenerator[Numbered]:
        replay: zmq.asyncio.Socket = self._context.socket(zmq.DEALER)
        replay.linger = 0
        replay.connect(_here(str(self._config.replay_endpoint)))
        try:
            await replay.send_multipart([b"", numbered(first)])
            while await replay.poll(REPLAY_TIMEOUT_MS):
                frames: list[Any] = await replay.recv_multipart()
                if frames[1] == END:
                    return
                yield int.from_bytes(frames[1], "big"), decode(frames[2])
        finally:
            replay.close()

    def close(self) -> None:
        self._live.close(linger=0)
        self._context.destroy(linger=0)


def _here(endpoint: str) -> str:
    """Return the address to connect to for an endpoint bound on this machine."""
    return endpoint.replace("*", "127.0.0.1").replace("[::]", "[::1]")
