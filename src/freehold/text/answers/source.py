"""Text that is read while it arrives.

Whoever reads is a generator that yields where it needs more text, so a parser is written as if all of it were there.
What it says depends on the text alone, not on how it was cut, because no method here decides anything that more text
could change.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import TypeVar

from freehold.text.answers.events import Arguments, CallStart, Content, Event, Reasoning

T = TypeVar("T")
Reading = Generator[None, None, T]
Say = Callable[[str], None]


class Broken(Exception):
    """What was read is not what it seemed to become."""


class Source:
    """The text so far, how much of it has been read (`at`), and what the reader has made of it. `thoughts_end`: how
    much of the whole text was thoughts, markers included. `call_id` gives each call its id."""

    def __init__(self, call_id: Callable[[int], str]) -> None:
        self.text = ""
        self.at = 0
        self.is_complete = False
        self.calls = 0
        self.thoughts_end = 0
        self._call_id = call_id
        self._dropped = 0
        self._events: list[Event] = []
        self._held = False  # whether text that has been read may be read again

    def add(self, text: str) -> None:
        if self.at and not self._held:
            self.text = self.text[self.at :]
            self._dropped += self.at
            self.at = 0
        self.text += text

    def take(self) -> list[Event]:
        """The events since the last time."""
        events, self._events = self._events, []
        return events

    # -- what a reader says -----------------------------------------------------------------------------

    def _say(self, event: Content | Reasoning | Arguments) -> None:
        """Neighbours of one kind are one event; a call's start stands between the arguments of two calls."""
        last = self._events[-1] if self._events else None
        if type(last) is type(event) and not isinstance(last, CallStart | None):
            self._events[-1] = replace(event, text=last.text + event.text)
        elif event.text:
            self._events.append(event)

    def content(self, text: str) -> None:
        self._say(Content(text))

    def reasoning(self, text: str) -> None:
        self._say(Reasoning(text))

    def end_thoughts(self) -> None:
        """What has been read so far was thoughts, or came before them."""
        self.thoughts_end = self._dropped + self.at

    def start_call(self, name: str) -> None:
        """From here on the call is one, whatever comes of it."""
        self._events.append(CallStart(self.calls, name, self._call_id(self.calls)))
        self.calls += 1
        self._held = False

    def arguments(self, text: str) -> None:
        """Of the call that was started last."""
        index = self.calls - 1
        self._say(Arguments(index, text))

    # -- what a reader reads ----------------------------------------------------------------------------

    def skip_space(self) -> Reading[None]:
        yield from self.run(_SPACE)

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """All that `pattern`, which matches any number of certain characters, can match from here."""
        begin = self.at
        while True:
            found = pattern.match(self.text, self.at)
            size = 0 if found is None else found.end() - self.at
            self.at += size
            if self.at < len(self.text) or self.is_complete:
                return self.text[begin : self.at]
            # The beginning has to stay: nothing is dropped before this has been returned.
            held, self._held = self._held, True
            yield
            self._held = held

    def peek(self) -> Reading[str]:
        """The next character, empty at the end."""
        while self.at == len(self.text) and not self.is_complete:
            yield
        return self.text[self.at : self.at + 1]

    def accept(self, *options: str) -> Reading[str]:
        """Read the longest of `options` that comes next -> it, or an empty text if none does."""
        while True:
            size = len(self.text) - self.at
            is_open = any(len(one) > size and self.text.startswith(one[:size], self.at) for one in options)
            if self.is_complete or not is_open:
                break
            yield
        found = max((one for one in options if self.text.startswith(one, self.at)), key=len, default="")
        self.at += len(found)
        return found

    def expect(self, *options: str) -> Reading[str]:
        """The same. Raises Broken if none comes next."""
        found = yield from self.accept(*options)
        if not found:
            raise Broken
        return found

    def until(self, stops: tuple[str, ...], say: Say, trims: str = "") -> Reading[str]:
        """Say what comes before the first of `stops` -> the one that was found, not read yet; empty at the end of the
        text. Characters of `trims` in front of a stop are not said: they are still to be read."""
        while True:
            at, found = min(((i, s) for s in stops if (i := self.text.find(s, self.at)) >= 0), default=(-1, ""))
            end = at if found else len(self.text) if self.is_complete else len(self.text) - self._undecided(stops)
            if found or not self.is_complete:
                end = self.at + len(self.text[self.at : end].rstrip(trims)) if trims else end
            say(self.text[self.at : end])
            self.at = end
            if found or self.is_complete:
                return found
            yield

    def _undecided(self, stops: tuple[str, ...]) -> int:
        """Length of the longest end of the text with which a stop may begin."""
        size = len(self.text) - self.at
        return max(
            (n for s in stops for n in range(1, min(len(s) - 1, size) + 1) if self.text.endswith(s[:n])), default=0
        )

    def optional(self, reading: Reading[None]) -> Reading[bool]:
        """Read it if it is there -> whether it was."""
        begin, held = self.at, self._held
        self._held = True
        try:
            yield from reading
        except Broken:
            self.at = begin
            return False
        finally:
            self._held = held
        return True

    def calls_behind(self, begin: str, calls: Callable[[], Reading[None]]) -> Reading[None]:
        """All of the text: content, and `calls` behind each `begin`. Space around them belongs to them."""
        while (yield from self.until((begin,), self.content, " \n\t\r")):
            size = self.text.index(begin, self.at) + len(begin) - self.at
            yield from self.attempt(self._behind(begin, calls()), size)

    def _behind(self, begin: str, calls: Reading[None]) -> Reading[None]:
        yield from self.skip_space()
        yield from self.expect(begin)
        yield from self.skip_space()
        yield from calls
        yield from self.skip_space()

    def attempt(self, reading: Reading[None], least: int) -> Reading[bool]:
        """Read calls -> whether any began. If none did before it broke, the first `least` characters were content.
        If it breaks later, the calls stay as far as they have come, and what follows is content; where the text ends
        within a call, nothing does."""
        begin, calls = self.at, self.calls
        self._held = True
        try:
            yield from reading
        except Broken:
            if self.calls == calls:
                self.at = begin + least
                self.content(self.text[begin : self.at])
            elif self.is_complete:
                self.at = len(self.text)
        finally:
            self._held = False
        return self.calls > calls


_SPACE = re.compile(r"\s*")
