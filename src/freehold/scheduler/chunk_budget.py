"""How many prompt tokens a step may compute beside decoding sequences."""

from __future__ import annotations

from freehold.scheduler.step_time import StepTime

CHUNK_MIN = 16  # prompts must progress, however slow the machine
CHUNK_FIRST = 64  # while the machine's speed is unknown
STEP_S = 0.25  # limit for a step's prompts: an arriving request waits for the step
CHUNK_SLOW = 128  # STEP_S does not cut chunks below this: small chunks are less efficient
TOGETHER_S = 0.1  # limit for several prompts in one step


class ChunkBudget:
    """At most `limit` tokens; with a target, few enough that decoding sequences get a token every `target` seconds."""

    def __init__(self, limit: int, target: float | None, time: StepTime):
        self._limit = limit
        self._target = target
        self.time = time

    def tokens(self, decoding: int) -> int:
        """Return the tokens for a step with `decoding` decoding sequences."""
        if self._target is None or decoding == 0:
            return self._within(STEP_S, CHUNK_SLOW)
        if self.time.token == 0.0:
            return min(CHUNK_FIRST, self._limit)
        return self._within(self._target - self.time.newest_decode, CHUNK_MIN)

    def together(self) -> int:
        """Return the tokens for a step of several prompts: the first ones finish before the last ones begin."""
        return self._within(TOGETHER_S, 2 * CHUNK_MIN)

    def _within(self, seconds: float, least: int) -> int:
        if self.time.token == 0.0:
            return self._limit
        return min(max(int(seconds / self.time.token), least), self._limit)


class PromptBudget:
    """Prompt tokens for one step. A client may use its entry in `shares`, or all of them without one.

    Several prompts in a step get `together` tokens. A prompt that needs no more than that is not cut by it, so the last
    one to begin can finish.
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
        """Return how many of the `wanted` prompt tokens a client may have."""
        if self.is_spent:
            return 0
        most = min(wanted, self._left, self._shares.get(client, self._left))
        return most if most <= self.together else min(most, self._together_left)

    def spend(self, client: int, tokens: int) -> None:
        self._left -= tokens
        self._together_left -= tokens
        if client in self._shares:
            self._shares[client] -= tokens
