"""How many prompt tokens a step may compute beside sequences that decode."""

from __future__ import annotations

from freehold.scheduler.step_time import StepTime

CHUNK_MIN = 16  # prompts must get on, however slow the machine is
CHUNK_FIRST = 64  # while nothing is known about it
STEP_S = 0.25  # the prompts of a step take no longer: a request that arrives waits for the step
CHUNK_SLOW = 128  # but a chunk is not cut below this because of STEP_S: small chunks are less efficient
TOGETHER_S = 0.1  # several prompts in one step take no longer


class ChunkBudget:
    """`limit` tokens; with a target, as many as let decoding sequences have a token every `target` seconds."""

    def __init__(self, limit: int, target: float | None, time: StepTime):
        self._limit = limit
        self._target = target
        self.time = time

    def tokens(self, decoding: int) -> int:
        """For a step in which so many sequences decode."""
        if self._target is None or decoding == 0:
            return self._within(STEP_S, CHUNK_SLOW)
        if self.time.token == 0.0:
            return min(CHUNK_FIRST, self._limit)
        return self._within(self._target - self.time.newest_decode, CHUNK_MIN)

    def together(self) -> int:
        """For a step of several prompts: the first of them are ready before the last ones begin."""
        return self._within(TOGETHER_S, 2 * CHUNK_MIN)

    def _within(self, seconds: float, least: int) -> int:
        if self.time.token == 0.0:
            return self._limit
        return min(max(int(seconds / self.time.token), least), self._limit)


class PromptBudget:
    """Prompt tokens for one step, of which a client may use what `shares` say, or all if it is not there.

    Where several prompts want the step, they have `together` tokens. A prompt that needs no more than that is not cut
    because of it: the last one that begins may end.
    """

    def __init__(self, tokens: int, shares: dict[int, int] | None = None, together: int | None = None):
        self._left = tokens
        self._shares = {} if shares is None else shares
        self.together = tokens if together is None else min(together, tokens)
        self._together_left = self.together

    @property
    def is_spent(self) -> bool:
        return min(self._left, self._together_left) <= 0

    def offer(self, client: int, wanted: int) -> int:
        """How many of the tokens that a client wants for a prompt it may have."""
        if self.is_spent:
            return 0
        most = min(wanted, self._left, self._shares.get(client, self._left))
        return most if most <= self.together else min(most, self._together_left)

    def spend(self, client: int, tokens: int) -> None:
        self._left -= tokens
        self._together_left -= tokens
        if client in self._shares:
            self._shares[client] -= tokens
