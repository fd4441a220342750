"""Commands to an engine process that ends meanwhile."""

import asyncio

import pytest
import zmq.asyncio

from freehold.contract.errors import EngineUnavailable
from freehold.ipc.child import EngineChild
from freehold.ipc.protocol import Abort


def with_a_command_under_way(then) -> None:
    """The other end of the socket has never been there, so the command waits."""

    async def run() -> None:
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.PAIR)
        child = EngineChild(socket, None)
        sending = asyncio.create_task(child.send(Abort("a")))
        await asyncio.sleep(0.05)  # nothing may happen
        assert not sending.done()
        try:
            await then(child, sending)
        finally:
            socket.close()
            context.destroy(linger=0)

    asyncio.run(run())


def test_whoever_sent_it_is_told_that_the_process_has_ended():
    async def end(child: EngineChild, sending: asyncio.Task) -> None:
        child.close()
        with pytest.raises(EngineUnavailable):
            await asyncio.wait_for(sending, 5)
        with pytest.raises(EngineUnavailable):
            await child.send(Abort("b"))

    with_a_command_under_way(end)


def test_whoever_gives_up_is_cancelled():
    async def leave(child: EngineChild, sending: asyncio.Task) -> None:
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending

    with_a_command_under_way(leave)
