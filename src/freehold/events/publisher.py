"""Publishes events: PUB for live followers, ROUTER for followers that missed some."""

from __future__ import annotations

import queue
import sys
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import zmq

from freehold.events.config import EventsConfig, binds
from freehold.events.wire import END, batch_of, encode, numbered
from freehold.memory.events import CacheEvent

POLL_MS = 100


class EventPublisher:
    """Numbers batches from 0. A follower that missed some asks for them by sending the first number, 8 bytes,
    big-endian. A thread sends; if it falls far behind, batches are dropped, and followers see the gap. Raises
    ValueError if an endpoint can't be used."""

    def __init__(self, config: EventsConfig, page_size: int):
        self._config = config
        self._page_size = page_size
        self._queue: queue.Queue[tuple[int, bytes] | None] = queue.Queue(config.max_queue_size)
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._count = 0
        self.dropped = 0
        self._context = zmq.Context()
        try:
            self._pub = self._socket(zmq.PUB, config.endpoint)
            self._replay = None if config.replay_endpoint is None else self._socket(zmq.ROUTER, config.replay_endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ValueError(f"kv_events_config: {config.endpoint}: {error}") from error
        self._thread = threading.Thread(target=self._work, name="kv-events", daemon=True)
        self._thread.start()

    def _socket(self, kind: int, endpoint: str) -> zmq.Socket[Any]:
        socket = self._context.socket(kind)
        socket.set_hwm(self._config.hwm)  # must precede bind and connect to take effect
        (socket.bind if kind == zmq.ROUTER or binds(endpoint) else socket.connect)(endpoint)
        return socket

    def publish(self, events: Sequence[CacheEvent]) -> None:
        """Queue one batch; nothing if there are no events. Never waits."""
        if not events:
            return
        number, self._count = self._count, self._count + 1
        try:
            self._queue.put_nowait((number, encode(batch_of(events, self._page_size))))
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Send what is queued, for at most a second."""
        self._queue.put(None)
        self._thread.join(1.0)
        self._context.destroy(linger=100)

    def _work(self) -> None:
        topic = self._config.topic.encode()
        while True:
            try:
                item = self._queue.get(timeout=POLL_MS / 1000)
            except queue.Empty:
                item = ()
            try:
                self._answer()
                if item is None:
                    return
                if item:
                    self._kept.append(item)
                    self._pub.send_multipart([topic, numbered(item[0]), item[1]])
            except Exception as error:  # the thread must go on, or the queue would fill
                print(f"freehold: events: {error}", file=sys.stderr, flush=True)

    def _answer(self) -> None:
        """Answer followers that ask for missed batches."""
        while self._replay is not None and self._replay.poll(0):
            frames = self._replay.recv_multipart()
            if len(frames) != 3:
                continue
            client, _, first = frames
            for number, payload in self._kept:
                if number >= int.from_bytes(first, "big"):
                    self._replay.send_multipart([client, b"", numbered(number), payload])
            self._replay.send_multipart([client, b"", END, b""])
