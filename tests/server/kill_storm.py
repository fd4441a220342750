"""Clients of a server whose processes are killed again and again: what it says is what it says cold, and no session is
lost."""

import asyncio
import random
from collections import Counter

from killing import Cut, KilledServer
from test_soak import Known, Soak

PROMPTS, PROMPT_TOKENS, ASKING = 10, 160, 3
SESSIONS, SESSION_TOKENS, TALKING = 6, 200, 2
MOMENTS_S = (0.05, 1.5)  # between a start and the next kill


class KillStorm:
    """`times` kills, of the server and of the engine in turn."""

    def __init__(self, server: KilledServer, times: int):
        self.server = server
        self.times = times
        self.tally: Counter[str] = Counter()
        self._is_over = False
        rng = random.Random(times)
        prompts = [tuple(rng.randrange(1000, 40000) for _ in range(PROMPT_TOKENS)) for _ in range(PROMPTS)]
        self._expected: dict[tuple[int, ...], str] = dict.fromkeys(prompts, "")
        self._sessions = Soak(server, 0)
        self._sessions.known = [Known(f"s{number}", None) for number in range(SESSIONS)]

    async def rage(self) -> None:
        async with self.server.client:
            for prompt in self._expected:
                self._expected[prompt] = await self._complete(prompt, cache_salt=f"cold {len(prompt)} {prompt[0]}")
            for known in self._sessions.known:
                await self.server.ask("/v1/sessions", {"session_id": known.name})
                await self._turn(known, random.Random(0))
            await asyncio.gather(self._kill(), *map(self._ask, range(ASKING)), *map(self._talk, range(TALKING)))
            await self._check_sessions(random.Random(1))

    # -- clients ------------------------------------------------------------------------------------------

    async def _complete(self, prompt: tuple[int, ...], **more: str) -> str:
        body = {"prompt": [*prompt], "max_tokens": 8, "temperature": 0, "ignore_eos": True, **more}
        said = (await self.server.ask("/v1/completions", body)).json()
        self.tally.update(said["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"])
        return said["choices"][0]["text"]

    async def _ask(self, number: int) -> None:
        rng = random.Random(number)
        while not self._is_over:
            prompt = rng.choice([*self._expected])
            try:
                assert await self._complete(prompt) == self._expected[prompt], "a wrong answer"
                self.tally["answers"] += 1
            except Cut:
                self.tally["cut off"] += 1

    async def _talk(self, number: int) -> None:
        rng = random.Random(number)
        while not self._is_over:
            known = rng.choice([known for known in self._sessions.known if not known.lock.locked()])
            async with known.lock:
                try:
                    await self._sessions.check_history(known)
                    await self._turn(known, rng)
                except Cut:
                    self.tally["turns cut off"] += 1

    async def _turn(self, known: Known, rng: random.Random) -> None:
        if len(known.tokens) > SESSION_TOKENS:
            await self._sessions.rewind(known, SESSION_TOKENS // 4)
        new = [rng.randrange(1000, 40000) for _ in range(rng.choice([3, 12, 40]))]
        await self._sessions.turn(known, {"prompt": new, "max_tokens": 6, "temperature": 0})
        self.tally["turns"] += 1

    # -- kills --------------------------------------------------------------------------------------------

    async def _kill(self) -> None:
        rng = random.Random(self.times)
        for number in range(self.times):
            await asyncio.sleep(rng.uniform(*MOMENTS_S))  # any moment
            await (self.server.kill_engine() if number % 2 else self.server.kill_server())
            await self._check_sessions(rng)
        self._is_over = True

    async def _check_sessions(self, rng: random.Random) -> None:
        """All are there and go on, and one says what it says cold."""
        cold = rng.choice(self._sessions.known)
        for known in self._sessions.known:
            async with known.lock:
                await self._sessions.check_history(known)
                await self._turn(known, rng)
                if known is cold:
                    await self._sessions.compare_with_a_cold_run(known)
                    self.tally["cold runs"] += 1
