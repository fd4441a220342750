"""How long steps take, learned while serving."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from freehold.contract.step import StepTiming

NEWEST = 0.2  # of an average, this share is the newest step
RISE = 0.003  # the same for steps that took longer than others of as many rows


class StepTime:
    """A step is taken to last `decode(rows)` seconds, and `token` more for each prompt token.

    Steps without prompts are known by their number of rows: what a row adds depends on how many there are, since
    kernels work on several at a time. What disturbs a step makes it longer, so these times fall fast and rise slowly;
    and since more rows never take less time, none counts for more than a time of more rows.
    """

    def __init__(self, timings: Sequence[StepTiming] = ()):
        self.token = 0.0  # what a prompt token adds, 0 while that is not known
        self.newest_decode = 0.0  # what steps without prompts lasted lately, 0 while that is not known
        self._rows: list[int] = []  # numbers of rows of steps without prompts, in order
        self._seconds: list[float] = []  # what steps with so many rows last undisturbed
        for timing in timings:
            self.learn(timing.decoding, timing.prompt_tokens, timing.seconds)

    @property
    def is_known(self) -> bool:
        """Whether there was a step without prompts."""
        return len(self._rows) > 0

    def decode(self, rows: int) -> float:
        """What a step of so many decoding rows lasts: 0 for none, and while nothing is known. Between numbers of rows
        that were seen it is a straight line; beyond them each row takes as much as the others."""
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
        """How many rows may join a step of one row that is to last no more than `seconds` longer."""
        limit = self.decode(1) + seconds
        below = 1
        while self.decode(2 * below) <= limit:
            below *= 2
        return bisect.bisect_right(range(2 * below), limit, lo=below, key=self.decode) - 2

    def learn(self, decoding: int, prompt_tokens: int, seconds: float) -> None:
        """What a step lasted."""
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
