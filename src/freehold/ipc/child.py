"""The engine's process, and the socket to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time

import zmq
import zmq.asyncio

from freehold.contract.errors import EngineUnavailable, InvalidParameter
from freehold.ipc import protocol as msg
from freehold.ipc.engine_setup import EngineSetup

STOP_TIMEOUT_S = 10.0


class EngineChild:
    """One process, with a socket of its own: what is on its way to one is lost with it."""

    def __init__(self, socket: zmq.asyncio.Socket, process: asyncio.subprocess.Process):
        self._socket = socket
        self._process = process
        self.heard = time.monotonic()  # when it last gave a sign of life

    @classmethod
    async def spawn(cls, context: zmq.asyncio.Context, address: str, setup: EngineSetup) -> EngineChild:
        """Raises EngineUnavailable if the system starts no process."""
        socket = context.socket(zmq.PAIR)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.bind(address)
        command = [sys.executable, "-m", "freehold.ipc.engine_process", address, setup.encode(), str(os.getpid())]
        try:
            process = await asyncio.create_subprocess_exec(*command, start_new_session=True)
        except OSError as error:
            socket.close()
            raise EngineUnavailable(f"its process can't be started: {error}") from error
        return cls(socket, process)

    @property
    def silence(self) -> float:
        """Seconds since the last sign of life."""
        return time.monotonic() - self.heard

    async def wait(self) -> int:
        """Until the process has ended -> its code."""
        return await self._process.wait()

    async def receive(self) -> msg.Report:
        report = msg.decode_report(await self._socket.recv())
        self.heard = time.monotonic()
        return report

    async def send(self, command: msg.Command) -> None:
        """Raises InvalidParameter for a number that the protocol can't hold, EngineUnavailable if the process ends."""
        try:
            message = msg.encode(command)
        except OverflowError:
            raise InvalidParameter("body", "has an integer that does not fit into 64 bits") from None
        try:
            sent = asyncio.ensure_future(self._socket.send(message))
            await asyncio.wait({sent})
            sent.result()
        except zmq.ZMQError as error:
            raise EngineUnavailable(f"the engine's process can't be reached: {error}") from None
        except asyncio.CancelledError:
            if sent.cancelled():  # the socket was closed: it is not our task that was cancelled
                raise EngineUnavailable("the engine's process has ended") from None
            raise

    def send_soon(self, command: msg.Command) -> None:
        """From a place that must not wait; the socket is never full."""
        with contextlib.suppress(zmq.ZMQError):
            sent = asyncio.ensure_future(self._socket.send(msg.encode(command), zmq.NOBLOCK))
            sent.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody is there to be told

    def kill(self) -> None:
        """Also a process that has been stopped."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """Ask it to end, and see to it."""
        if self._process.returncode is None:
            self.send_soon(msg.Stop())
        try:
            await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            self.kill()
            await self._process.wait()

    def close(self) -> None:
        self._socket.close()
