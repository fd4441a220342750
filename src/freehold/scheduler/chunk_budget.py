"""How many prompt tokens a step may compute beside sequences that decode."""

from __future__ import annotations

from freehold.scheduler.step_time import StepTime

CHUNK_MIN = 16  # prompts must get on, however slow the machine is
CHUNK_FIRST = 64  # while nothing is known about it


class ChunkBudget:
    """`limit` tokens; with a target, as many as let decoding sequences have a token every `target` seconds."""

    def __init__(self, limit: int, target: float | None, time: StepTime):
        self._limit = limit
        self._target = target
        self.time = time

    def tokens(self, decoding: int) -> int:
        """For a step in which so many sequences decode."""
        if self._target is None or decoding == 0:
            return self._limit
        if self.time.token == 0.0:
            return min(CHUNK_FIRST, self._limit)
        affordable = int(max(self._target - self.time.newest_decode, 0.0) / self.time.token)
        return min(max(affordable, CHUNK_MIN), self._limit)


class PromptBudget:
    """`left` prompt tokens for one step, of which a client may use what `shares` say, or all if it is not there."""

    def __init__(self, tokens: int, shares: dict[int, int] | None = None):
        self.left = tokens
        self._shares = {} if shares is None else shares

    def offer(self, client: int) -> int:
        """How many tokens a client may still have."""
        return min(self.left, self._shares.get(client, self.left))

    def spend(self, client: int, tokens: int) -> None:
        self.left -= tokens
        if client in self._shares:
            self._shares[client] -= tokens
