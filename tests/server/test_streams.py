"""Outputs on their way: how many tokens travel together."""

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freehold.contract.errors import FreeholdError
from freehold.contract.sampling_params import SamplingParams
from freehold.ipc import protocol as msg
from freehold.ipc.async_engine import AsyncEngine
from freehold.ipc.protocol import Ended
from freehold.ipc.streams import Delta, Stream

NEWS = st.lists(st.integers(0, 5), min_size=1, max_size=30)  # tokens that steps bring


def sent(stream: Stream) -> list[Delta]:
    found = []
    while not stream.deltas.empty():
        found.append(stream.deltas.get_nowait())
    return found


@given(NEWS, st.integers(1, 8))
def test_nothing_is_lost_and_only_the_ends_may_be_short(counts, interval):
    stream = Stream(3, None, asyncio.Queue(), None, interval)
    tokens = 0
    for number, count in enumerate(counts):
        new = list(range(tokens, tokens + count))
        tokens += count
        is_last = number == len(counts) - 1
        ended = Ended("a", "length", 1, 0, tokens, 0, 0.0) if is_last else None
        text = "".join(chr(97 + token) for token in new)
        stream.take(Delta(3, text, new, [], ended, number, ends=[token + 1 for token in new]))
        if number == 0:
            assert stream.deltas.qsize() == 1, "the first token waits for nobody"
    deltas = sent(stream)
    assert [token for delta in deltas for token in delta.tokens] == list(range(tokens))
    assert "".join(delta.text for delta in deltas) == "".join(chr(97 + token) for token in range(tokens))
    assert [end for delta in deltas for end in delta.ends] == [token + 1 for token in range(tokens)]
    assert [delta.ended is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert deltas[-1].cached_tokens == len(counts) - 1
    assert all(len(delta.tokens) >= interval for delta in deltas[1:-1])


class Panic(BaseException):
    """What a library in Rust raises: no Exception."""


class Tokens:
    """A tokenizer that breaks at one token."""

    def __init__(self, error: BaseException):
        self.error = error

    def piece(self, token: int, skip_special_tokens: bool) -> bytes:
        if token == 666:
            raise self.error
        return b"x"


class Child:
    """An engine process that accepts everything and says what the test tells it to."""

    silence = 0.0

    def __init__(self) -> None:
        self.reports: asyncio.Queue[msg.Report] = asyncio.Queue()
        self.sent: list[msg.Command] = []

    async def receive(self) -> msg.Report:
        return await self.reports.get()

    async def send(self, command: msg.Command) -> None:
        if isinstance(command, msg.Submit):
            await self.reports.put(msg.Accepted(command.id))

    def send_soon(self, command: msg.Command) -> None:
        self.sent.append(command)


@pytest.mark.parametrize("error", [ValueError("a token"), Panic("a token")])
@pytest.mark.parametrize("is_last", [False, True])
def test_a_fault_in_decoding_ends_one_request(error, is_last):
    async def run() -> None:
        engine, child = AsyncEngine(), Child()
        engine.ready, engine._child, engine._tokenizer = msg.Ready("m", "llama", 999, 99, 99), child, Tokens(error)
        listening = asyncio.create_task(engine._listen(child))

        async def text(name: str) -> str:
            params = SamplingParams(max_tokens=5)
            return "".join([delta.text async for delta in engine.stream([np.array([1], np.int32)], params, name)])

        bad, good = (asyncio.create_task(text(name)) for name in ("bad", "good"))
        while len(engine._streams) < 2 or not all(one.accepted.done() for one in engine._streams.values()):
            await asyncio.sleep(0)
        ended = [Ended("bad-0", "length", 1, 0, 1, 0, 0.0)] if is_last else []
        await child.reports.put(msg.Progress(["bad-0", "good-0"], [666, 7], {}, ended))
        with pytest.raises(FreeholdError, match="a token"):
            await asyncio.wait_for(bad, 5)
        assert child.sent == ([] if is_last else [msg.Abort("bad-0")])
        await child.reports.put(
            msg.Progress(["bad-0", "good-0"], [666, 7], {}, [Ended("good-0", "length", 1, 0, 2, 0, 0.0)])
        )
        assert await asyncio.wait_for(good, 5) == "xx"
        assert not engine._streams
        listening.cancel()

    asyncio.run(run())
