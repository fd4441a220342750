"""The engine's process and the socket to it."""

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
    """One process with its own socket: messages in transit are lost with the process."""

    def __init__(self, socket: zmq.asyncio.Socket, process: asyncio.subprocess.Process):
        self._socket = socket
        self._process = process
        self.heard = time.monotonic()  # time of the last message from it

    @classmethod
    async def spawn(cls, context: zmq.asyncio.Context, address: str, setup: EngineSetup) -> EngineChild:
        """Raise EngineUnavailable if the system starts no process."""
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
        """Seconds since the last message."""
        return time.monotonic() - self.heard

    async def wait(self) -> int:
        """Wait until the process ends and return its exit code."""
        return await self._process.wait()

    async def receive(self) -> msg.Report:
        report = msg.decode_report(await self._socket.recv())
        self.heard = time.monotonic()
        return report

    async def send(self, command: msg.Command) -> None:
        """Send a command. Raises InvalidParameter for an integer over 64 bits, EngineUnavailable if the process
        ends."""
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
            if sent.cancelled():  # the socket was closed; this task was not cancelled
                raise EngineUnavailable("the engine's process has ended") from None
            raise

    def send_soon(self, command: msg.Command) -> None:
        """Send without waiting, from synchronous code. The socket is never full."""
        with contextlib.suppress(zmq.ZMQError):
            sent = asyncio.ensure_future(self._socket.send(msg.encode(command), zmq.NOBLOCK))
            sent.add_done_callback(lambda done: done.cancelled() or done.exception())  # no caller to report to

    def kill(self) -> None:
        """Kill the process, even if it is suspended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """Ask the process to stop, and kill it after STOP_TIMEOUT_S."""
        if self._process.returncode is None:
            self.send_soon(msg.Stop())
        try:
            await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            self.kill()
            await self._process.wait()

    def close(self) -> None:
        self._socket.close()
