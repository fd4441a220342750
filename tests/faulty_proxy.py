"""Stands before a real server, and answers in its place: never, a byte at a time, not at all, or nonsense."""

import contextlib
import itertools
import random
import socket
import threading
from enum import StrEnum

BEGINNINGS = {"redis": b"$1000000\r\n", "s3": b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"}
NOISE = random.Random(0).randbytes(64) + b"\r\n"
NONSENSE = {
    "redis": (NOISE, b":x\r\n", b"$abc\r\n", b"+OK\r\n" * 100, b":7\r\n" * 100, b"*1\r\n$1\r\nx\r\n" * 100),
    "s3": (NOISE, b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nLast-Modified: now\r\n\r\nhello", b"HTTP/1.1 999 \r\n\r\n"),
}
DRIP_S = 0.05


class Fault(StrEnum):
    """What becomes of each request."""

    HANGS = "hangs"
    DRIPS = "drips"
    FAILS = "fails"
    NONSENSE = "nonsense"


class FaultyProxy:
    """Listens at `port`. With a `fault` each connection has it, without one it reaches the server at port `real`."""

    def __init__(self, kind: str, real: int):
        self.fault: Fault | None = None
        self._kind, self._real = kind, real
        self._nonsense = itertools.cycle(NONSENSE[kind])
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port = self._listening.getsockname()[1]
        self._ended = threading.Event()
        self._open: list[socket.socket] = [self._listening]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._begin(self._serve, self._listening.accept()[0])

    def _begin(self, work, *sockets) -> None:
        self._open += sockets

        def run() -> None:
            with contextlib.suppress(OSError):
                work(*sockets)

        threading.Thread(target=run, daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        server = socket.create_connection(("127.0.0.1", self._real))
        self._begin(self._answer, server, client)
        while sent := client.recv(1 << 16):
            if self.fault is None:
                server.sendall(sent)
            else:
                self._spoil(client)
        server.close()

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        while answer := server.recv(1 << 16):
            client.sendall(answer)
        client.close()

    def _spoil(self, client: socket.socket) -> None:
        match self.fault:
            case Fault.HANGS:
                self._ended.wait()
            case Fault.DRIPS:
                client.sendall(BEGINNINGS[self._kind])
                while not self._ended.wait(DRIP_S):
                    client.sendall(b"x")
            case Fault.FAILS:
                client.close()
            case _:
                client.sendall(next(self._nonsense))
                client.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._ended.set()
        for one in self._open:
            one.close()
