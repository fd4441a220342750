"""How long steps take, learned while serving."""

from __future__ import annotations

from collections.abc import Sequence

from freehold.step import StepTiming

NEWEST = 0.2  # of an average, this share is the newest step
MEMORY = 0.99  # of what decoding rows cost, this share survives a step
SPREAD_MIN = 0.5  # variance of rows
ROW_SHARE_MIN = 0.01  # of a step


class StepTime:
    """A step is taken to last `decode(rows) + token * prompt tokens` seconds, and `decode` to be a straight line: what
    any step costs, and what a row adds. All of it is averages that forget."""

    def __init__(self, timings: Sequence[StepTiming] = ()):
        self.token = 0.0  # what a prompt token adds, 0 while that is not known
        self.row = 0.0  # what a decoding row adds, likewise
        self._decode = 0.0  # what steps without prompts last
        self._weight = 0.0
        self._rows = 0.0  # sums over steps without prompts: of rows, their squares, seconds, and products of both
        self._squares = 0.0
        self._seconds = 0.0
        self._products = 0.0
        for timing in timings:
            self.learn(timing.decoding, timing.prompt_tokens, timing.seconds)

    @property
    def newest_decode(self) -> float:
        """What steps without prompts lasted lately, 0 while that is not known."""
        return self._decode

    def decode(self, rows: int) -> float:
        """What a step of so many decoding rows lasts, if `row` is known."""
        mean_rows, mean_seconds = self._rows / self._weight, self._seconds / self._weight
        return max(mean_seconds + self.row * (rows - mean_rows), self.row * rows)

    def learn(self, decoding: int, prompt_tokens: int, seconds: float) -> None:
        """What a step lasted."""
        if prompt_tokens:
            rest = seconds - (self.decode(decoding) if decoding and self._weight else 0.0)
            self.token = _average(self.token, max(rest, 0.0) / prompt_tokens)
            return
        self._decode = _average(self._decode, seconds)
        self._weight = MEMORY * self._weight + 1.0
        self._rows = MEMORY * self._rows + decoding
        self._squares = MEMORY * self._squares + decoding * decoding
        self._seconds = MEMORY * self._seconds + seconds
        self._products = MEMORY * self._products + seconds * decoding
        self._fit()

    def _fit(self) -> None:
        """Least squares. Where all steps had about as many rows, the slope stays as it was."""
        spread = self._squares / self._weight - (self._rows / self._weight) ** 2
        if spread > SPREAD_MIN:
            common = self._products / self._weight - self._rows * self._seconds / self._weight**2
            # However noisy the times are, a row costs something.
            self.row = max(common / spread, ROW_SHARE_MIN * self._decode)


def _average(old: float, new: float) -> float:
    return new if old == 0.0 else (1 - NEWEST) * old + NEWEST * new
