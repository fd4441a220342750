"""Incremental detokenization."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from freehold.contract.sampling_params import SamplingParams
from freehold.contract.stop_regex import StopRegexes
from freehold.text.tokenizer import Tokenizer


class Detokenizer:
    """The growing text of one output. Incomplete UTF-8 and possible stop strings are held back until resolved. `marks`:
    texts that replace certain tokens."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams | None = None,
        skip_special_tokens: bool = True,
        marks: Mapping[int, str] = MappingProxyType({}),
    ):
        params = params or SamplingParams()
        self.text = ""  # all of it, held-back text included
        self.ends: list[int] = []  # its length after each token
        self._marks = marks
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stop = params.stop
        self._regexes = StopRegexes(params.stop_regex) if params.stop_regex else None
        self._regex_at: int | None = None  # where a stop regex matched
        self._min_tokens = params.min_tokens
        self._token_count = 0
        self._includes_stop = params.include_stop
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._sent = 0
        self._before_last = 0  # length of the text before the last token
        self._void = 0  # end of a stop that came too early: no later stop begins before it

    def add(self, token: int) -> str:
        """Add a token. Return the text that is now safe to show."""
        self._take(token)
        return self._release(len(self.text) - self._held_back())

    def _take(self, token: int) -> None:
        self._before_last = len(self.text)
        self._token_count += 1
        piece = self._tokenizer.piece(token, self._skip_special_tokens)
        mark = self._marks.get(token)
        self.text += self._decoder.decode(piece) if mark is None else self._decoder.decode(b"", final=True) + mark
        self.ends.append(len(self.text))
        if self._token_count < self._min_tokens and any(self._begin_of(stop) >= 0 for stop in self._stop):
            self._void = len(self.text)
        if self._regexes is not None:
            self._watch(self._regexes, piece)

    def _watch(self, regexes: StopRegexes, piece: bytes) -> None:
        found = regexes.add(piece, self._token_count >= self._min_tokens)
        if found is not None and self._regex_at is None:
            self._regex_at = found[0]

    def finish(self, matched: int | str | None, tokens: Sequence[int] = ()) -> str:
        """Add the last `tokens`, cut the output at the stop that `matched` unless it is to be included, and return the
        rest of the text."""
        for token in tokens:
            self._take(token)
        if not self._includes_stop:
            self._cut(matched)
        elif isinstance(matched, int):
            whole = self._tokenizer.piece(matched, False)  # even if special
            self.text = self.text[: self._before_last] + whole.decode(errors="replace")
        if not isinstance(matched, int):
            self.text += self._decoder.decode(b"", final=True)
        return self._release(len(self.text))

    def _cut(self, matched: int | str | None) -> None:
        if isinstance(matched, int):
            self.text = self.text[: self._before_last]
        elif matched is not None and self._regex_at is not None and matched not in self._stop:
            self.text = self.text[: self._regex_at]
        elif matched is not None:
            at = self._begin_of(matched)
            if at >= 0:
                self.text = self.text[:at]

    def _begin_of(self, stop: str) -> int:
        """Return where a stop begins that the last token completed, or -1."""
        return self.text.find(stop, max(self._void, self._before_last - len(stop) + 1))

    def _release(self, end: int) -> str:
        fresh = self.text[self._sent : end]
        self._sent = max(self._sent, end)
        return fresh

    def _held_back(self) -> int:
        """Return the length to hold back: the longest suffix that starts a stop string or follows the start of a
        completed one."""
        longest = 0 if self._regexes is None else self._regexes.held
        if self._regex_at is not None:
            longest = len(self.text) - self._regex_at
        for stop in self._stop:
            at = self._begin_of(stop)
            if at >= 0:
                longest = max(longest, len(self.text) - at)
            for size in range(min(len(stop), len(self.text) - self._void), longest, -1):
                if self.text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
