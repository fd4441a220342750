"""Step duration, learned while serving."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from freehold.contract.step import StepTiming

NEWEST = 0.2  # weight of the newest step in an average
RISE = 0.003  # the same for steps slower than earlier ones of as many rows


class StepTime:
    """Models a step as `decode(rows)` seconds plus `token` seconds for each prompt token.

    Steps without prompts are recorded by number of rows: a row's cost depends on how many there are, since kernels
    process several at a time. Disturbances only make steps longer, so these times fall fast and rise slowly. More rows
    never take less time, so no time counts for more than that of more rows.
    """

    def __init__(self, timings: Sequence[StepTiming] = ()):
        self.token = 0.0  # cost of a prompt token, 0 while unknown
        self.newest_decode = 0.0  # recent average of steps without prompts, 0 while unknown
        self._rows: list[int] = []  # numbers of rows of steps without prompts, in order
        self._seconds: list[float] = []  # undisturbed duration for each number of rows
        for timing in timings:
            self.learn(timing.decoding, timing.prompt_tokens, timing.seconds)

    @property
    def is_known(self) -> bool:
        """Whether a step without prompts was recorded."""
        return len(self._rows) > 0

    def decode(self, rows: int) -> float:
        """Return the seconds of a step of `rows` decoding rows: 0 for none, and while unknown. Interpolate linearly
        between recorded numbers of rows; beyond them each row takes as much as the others."""
        if rows == 0 or not self._rows:
            return 0.0
        at = bisect.bisect_left(self._rows, rows)
        if at == len(self._rows):
            return self._seconds[-1] * rows / self._rows[-1]
        after = min(self._seconds[at:])
        if self._rows[at] == rows or at == 0:
            return after
        before = min(self._seconds[at - 1], after)
        share = (rows - self._rows[at - 1]) / (self._rows[at] - self._rows[at - 1])
        return before + share * (after - before)

    def rows_within(self, seconds: float) -> int:
        """Return how many rows may join a step of one row that may take at most `seconds` longer."""
        limit = self.decode(1) + seconds
        below = 1
        while self.decode(2 * below) <= limit:
            below *= 2
        return bisect.bisect_right(range(2 * below), limit, lo=below, key=self.decode) - 2

    def learn(self, decoding: int, prompt_tokens: int, seconds: float) -> None:
        """Record the duration of a step."""
        if prompt_tokens:
            rest = max(seconds - self.decode(decoding), 0.0)
            self.token = _average(self.token, rest / prompt_tokens)
            return
        self.newest_decode = _average(self.newest_decode, seconds)
        at = bisect.bisect_left(self._rows, decoding)
        if at < len(self._rows) and self._rows[at] == decoding:
            old = self._seconds[at]
            self._seconds[at] = _average(old, seconds, RISE if seconds > old else NEWEST)
        else:
            self._rows.insert(at, decoding)
            self._seconds.insert(at, seconds)


def _average(old: float, new: float, share: float = NEWEST) -> float:
    return new if old == 0.0 else (1 - share) * old + share * new
