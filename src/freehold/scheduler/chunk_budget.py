"""How many prompt tokens a step may compute beside sequences that decode."""

from __future__ import annotations

CHUNK_MIN = 16  # prompts must get on, however slow the machine is
CHUNK_FIRST = 64  # while nothing is known about it
NEWEST = 0.2  # of an average, this share is the newest step


class ChunkBudget:
    """`limit` tokens; with a target, as many as let decoding sequences have a token every `target` seconds.

    A step with n prompt tokens is taken to last `decode + n * token`: what steps without prompts last, and what a
    prompt token adds. Both are averages that forget.
    """

    def __init__(self, limit: int, target: float | None):
        self._limit = limit
        self._target = target
        self._decode = 0.0
        self._token = 0.0

    def tokens(self, decoding: int) -> int:
        """For a step in which so many sequences decode."""
        if self._target is None or decoding == 0:
            return self._limit
        if self._token == 0.0:
            return min(CHUNK_FIRST, self._limit)
        affordable = int(max(self._target - self._decode, 0.0) / self._token)
        return min(max(affordable, CHUNK_MIN), self._limit)

    def learn(self, decoding: int, prompt_tokens: int, seconds: float) -> None:
        """What a step lasted."""
        if prompt_tokens == 0:
            self._decode = _average(self._decode, seconds)
        else:
            rest = seconds - (self._decode if decoding else 0.0)
            self._token = _average(self._token, max(rest, 0.0) / prompt_tokens)


class PromptBudget:
    """`left` prompt tokens for one step, of which each of `clients` that have prompts may use an equal share."""

    def __init__(self, tokens: int, clients: int):
        self.left = tokens
        self._share = max(-(-tokens // max(clients, 1)), CHUNK_MIN)
        self._used: dict[int, int] = {}

    def offer(self, client: int) -> int:
        """How many tokens a client may still have."""
        return min(self.left, self._share - self._used.get(client, 0))

    def spend(self, client: int, tokens: int) -> None:
        self.left -= tokens
        self._used[client] = self._used.get(client, 0) + tokens


def _average(old: float, new: float) -> float:
    return new if old == 0.0 else (1 - NEWEST) * old + NEWEST * new
