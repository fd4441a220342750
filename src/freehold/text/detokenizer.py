"""Tokens to text as they arrive."""

from __future__ import annotations

import codecs

from freehold.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one output, growing. Incomplete UTF-8 and text that may become a stop string are held
    back until it is clear what they are."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = (), skip_special_tokens: bool = True):
        self.text = ""  # all of it, held-back text included
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stop = stop
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._sent = 0
        self._before_last = 0  # length of the text before the last token

    def add(self, token: int) -> str:
        """-> the text that is now safe to show."""
        self._before_last = len(self.text)
        self.text += self._decoder.decode(self._tokenizer.piece(token, self._skip_special_tokens))
        return self._release(len(self.text) - self._held_back())

    def finish(self, matched: int | str | None) -> str:
        """The output is complete; cut it at the stop that `matched` -> the rest of the text."""
        if isinstance(matched, int) and not self._skip_special_tokens:
            self.text = self.text[: self._before_last]
        else:
            self.text += self._decoder.decode(b"", final=True)
        if isinstance(matched, str):
            # The last token completed it; an earlier occurrence was before min_tokens.
            at = self.text.find(matched, max(0, self._before_last - len(matched)))
            if at >= 0:
                self.text = self.text[:at]
        return self._release(len(self.text))

    def _release(self, end: int) -> str:
        fresh = self.text[self._sent : end]
        self._sent = max(self._sent, end)
        return fresh

    def _held_back(self) -> int:
        """Length of the longest end of the text with which some stop string begins, or that the last token
        brought behind the beginning of one."""
        longest = 0
        for stop in self._stop:
            at = self.text.find(stop, max(0, self._before_last - len(stop) + 1))
            if at >= 0:
                longest = max(longest, len(self.text) - at)
            for size in range(min(len(stop), len(self.text)), longest, -1):
                if self.text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
