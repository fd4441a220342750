"""A day of a server: conversations that come back after minutes or hours, over memory that is too small for them,
stores that are away for a while, processes that are killed, and a clock that jumps."""

import asyncio
import random
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from behind import Behind
from jumping_clock import JumpingClock
from killing import Cut, KilledServer

PAGE = 16
PAGE_BYTES = 2 * 2 * PAGE * 30 * 3 * 64  # keys and values, bfloat16, layers, heads, dimension of the bundled model
SYSTEMS, SYSTEM_TOKENS = 4, 64
TURNS, TURN_TOKENS = 5, 48
LIMIT = SYSTEM_TOKENS + TURNS * TURN_TOKENS + 2 * PAGE
DEVICE, HOST, STORAGE = 0.05, 0.2, 0.5  # of what all conversations need
SPREADS = (0.1, 0.5, 1.0)  # of the day, between two turns at most
OUTAGE_S, OUTAGES_EVERY_S = 5.0, 60.0
JUMPS_S = (3600, -7200, 86400, -30 * 86400, 400 * 86400)
TIERS = ("device", "host", "storage")


@dataclass
class Talk:
    """One conversation: tokens of its system prompt and all turns, and when each turn comes."""

    tokens: list[int]
    times: list[float]

    def prompts(self) -> Iterator[tuple[float, list[int]]]:
        for number, at in enumerate(self.times, 1):
            yield at, self.tokens[: SYSTEM_TOKENS + number * TURN_TOKENS]


def talks(count: int, seconds: float) -> tuple[list[list[int]], list[Talk]]:
    """The system prompts, and conversations with them: some of an hour, some of most of the day."""
    rng = random.Random(count)
    systems = [[rng.randrange(1000, 40000) for _ in range(SYSTEM_TOKENS)] for _ in range(SYSTEMS)]
    found: list[Talk] = []
    for number in range(count):
        gaps = [rng.random() * SPREADS[number % len(SPREADS)] for _ in range(TURNS - 1)]
        gaps = [gap * min(1, 0.95 / sum(gaps)) for gap in gaps]
        times = np.cumsum([rng.uniform(0, 0.97 - sum(gaps)), *gaps]) * seconds
        own = [rng.randrange(1000, 40000) for _ in range(TURNS * TURN_TOKENS)]
        found.append(Talk([*systems[number % SYSTEMS], *own], times.tolist()))
    return systems, found


class Lru:
    """The model: one cache of so many pages, least recently used first, where nothing fails and nothing takes time."""

    def __init__(self, pages: int | None):
        self._pages = pages
        self._cached: OrderedDict[tuple[int, ...], None] = OrderedDict()

    def ask(self, prompt: list[int]) -> int:
        """-> tokens found."""
        path = [tuple(prompt[:end]) for end in range(PAGE, len(prompt), PAGE)]
        found = next((number for number, page in enumerate(path) if page not in self._cached), len(path))
        for page in reversed(path):  # ends go before beginnings
            self._cached[page] = None
            self._cached.move_to_end(page)
        while self._pages is not None and len(self._cached) > self._pages:
            self._cached.popitem(last=False)
        return found * PAGE


@dataclass
class Day:
    """What the server has said. `seconds` is the length of the day."""

    server: KilledServer
    behind: Behind
    clock: JumpingClock
    seconds: float
    count: int
    kills_at: tuple[float, ...]
    started: float = 0.0
    asked: list[tuple[float, list[int], dict[str, int]]] = field(default_factory=list)
    found_after: list[list[dict[str, int]]] = field(default_factory=list)  # a restart, for each system prompt
    outages: int = 0
    one_fault: asyncio.Lock = field(default_factory=asyncio.Lock)  # a start finds its store

    def __post_init__(self) -> None:
        self.systems, self.talks = talks(self.count, self.seconds)
        self.server.on_start = self.look_for_systems

    @property
    def now(self) -> float:
        return time.monotonic() - self.started

    async def until(self, at: float) -> None:
        await asyncio.sleep(max(at - self.now, 0))  # a day has its hours

    async def pass_by(self) -> None:
        self.started = time.monotonic()
        async with self.server.client:
            await asyncio.gather(*map(self.talk, self.talks), self.kill(), self.take_away(), self.jump())

    async def talk(self, talk: Talk) -> None:
        for at, prompt in talk.prompts():
            await self.until(at)
            while (tiers := await self.ask(prompt)) is None:
                pass
            self.asked.append((self.now, prompt, tiers))

    async def ask(self, prompt: list[int]) -> dict[str, int] | None:
        """-> tokens found by tier; None if a kill has cut it off."""
        before = self.clock.ahead
        try:
            said = (await self.server.ask("/v1/completions", body(prompt))).json()
        except Cut:
            return None
        ahead = said["created"] - time.time()
        assert any(abs(ahead - one) < 300 for one in (before, self.clock.ahead)), "the server has another clock"
        return said["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]

    # -- what happens meanwhile ---------------------------------------------------------------------------

    async def kill(self) -> None:
        """The server, the engine, the server."""
        for number, at in enumerate(self.kills_at):
            await self.until(at)
            async with self.one_fault:
                await (self.server.kill_engine() if number % 2 else self.server.kill_server())

    async def look_for_systems(self) -> None:
        """Before anything else is asked."""
        tiers: list[dict[str, int]] = []
        for number, system in enumerate(self.systems):
            answer = await self.server.client.post("/v1/completions", json=body([*system, 7 + number]))
            tiers.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"])
        self.found_after.append(tiers)

    async def take_away(self) -> None:
        """The store, in the midst of each minute."""
        at = OUTAGES_EVERY_S / 2
        while at + OUTAGE_S < self.seconds:
            await self.until(at)
            async with self.one_fault:
                self.behind.stop()
                try:
                    await asyncio.sleep(OUTAGE_S)
                finally:
                    self.behind.go_on()
            self.outages += 1
            at += OUTAGES_EVERY_S

    async def jump(self) -> None:
        for number, seconds in enumerate(JUMPS_S, 1):
            await self.until(number * self.seconds / (len(JUMPS_S) + 1))
            self.clock.jump(seconds)

    # -- figures ------------------------------------------------------------------------------------------

    def report(self, largest: int | None, total: int | None) -> float:
        """Print each minute's tokens found, as shares of those asked for, beside those that a model of the size of the
        largest tier finds, and one of all tiers -> the whole day's, in proportion to the first model's."""
        models = {"largest tier": Lru(largest), "all tiers": Lru(total)}
        minutes = [Counter[str]() for _ in range(int(self.now // 60) + 1)]
        for at, prompt, tiers in self.asked:
            found = {name: model.ask(prompt) for name, model in models.items()}
            minutes[int(at // 60)].update({"asked": len(prompt), **found, **tiers})
        day = sum(minutes, Counter[str]())
        for name, one in [*enumerate(minutes), ("day", day)]:
            shares = "  ".join(f"{tier} {one[tier] / max(one['asked'], 1):.3f}" for tier in (*models, *TIERS))
            print(f"{name!s:>4}  {one['asked']:7} tokens  {shares}")
        found = sum(day[tier] for tier in TIERS)
        print(*(f"{found / day[name]:.3f} of what a model of {name} finds" for name in models), sep=", ")
        return found / day["largest tier"]


def body(prompt: list[int]) -> dict:
    return {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}


def pages_needed(count: int) -> int:
    """By all conversations, each page once."""
    _, found = talks(count, 1.0)
    return len({tuple(talk.tokens[:end]) for talk in found for end in range(PAGE, len(talk.tokens), PAGE)})
