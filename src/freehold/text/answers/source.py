"""Incremental text for parsers.

A parser is a generator that yields where it needs more text, so it is written as if all text were there. Its result
does not depend on how the text was split, because no method here decides anything that more text could change.
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
    """The text is not what it appeared to be."""


class Source:
    """The text so far, the read position `at`, and the parsed events. `thoughts_end`: length of the thoughts in the
    whole text, markers included. `call_id` gives each call its id."""

    def __init__(self, call_id: Callable[[int], str]) -> None:
        self.text = ""
        self.at = 0
        self.is_complete = False
        self.calls = 0
        self.thoughts_end = 0
        self._call_id = call_id
        self._dropped = 0
        self._events: list[Event] = []
        self._held = False  # whether read text may be read again

    def add(self, text: str) -> None:
        if self.at and not self._held:
            self.text = self.text[self.at :]
            self._dropped += self.at
            self.at = 0
        self.text += text

    def take(self) -> list[Event]:
        """Return the events since the last time."""
        events, self._events = self._events, []
        return events

    # -- output of a parser ------------------------------------------------------------------------------

    def _say(self, event: Content | Reasoning | Arguments) -> None:
        """Add an event, merging neighbours of one kind; a call's start separates the arguments of two calls."""
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
        """Mark everything read so far as thoughts."""
        self.thoughts_end = self._dropped + self.at

    def start_call(self, name: str) -> None:
        """Start a call, which can't be undone."""
        self._events.append(CallStart(self.calls, name, self._call_id(self.calls)))
        self.calls += 1
        self._held = False

    def arguments(self, text: str) -> None:
        """Add arguments to the last call."""
        index = self.calls - 1
        self._say(Arguments(index, text))

    # -- input of a parser -------------------------------------------------------------------------------

    def skip_space(self) -> Reading[None]:
        yield from self.run(_SPACE)

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Read all that `pattern` matches from here. It must match any number of certain characters."""
        begin = self.at
        while True:
            found = pattern.match(self.text, self.at)
            size = 0 if found is None else found.end() - self.at
            self.at += size
            if self.at < len(self.text) or self.is_complete:
                return self.text[begin : self.at]
            # The beginning must stay: nothing is dropped before this returns.
            held, self._held = self._held, True
            yield
            self._held = held

    def peek(self) -> Reading[str]:
        """Return the next character without reading it, "" at the end."""
        while self.at == len(self.text) and not self.is_complete:
            yield
        return self.text[self.at : self.at + 1]

    def accept(self, *options: str) -> Reading[str]:
        """Read and return the longest of `options` that comes next, or "" if none does."""
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
        """Accept one of `options`. Raises Broken if none comes next."""
        found = yield from self.accept(*options)
        if not found:
            raise Broken
        return found

    def until(self, stops: tuple[str, ...], say: Say, trims: str = "") -> Reading[str]:
        """Say the text before the first of `stops`. Return the stop, still unread, or "" at the end. Characters of
        `trims` before a stop are not said and remain unread."""
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
        """Return the length of the longest suffix with which a stop may begin."""
        size = len(self.text) - self.at
        return max(
            (n for s in stops for n in range(1, min(len(s) - 1, size) + 1) if self.text.endswith(s[:n])), default=0
        )

    def optional(self, reading: Reading[None]) -> Reading[bool]:
        """Try a reading, rewinding if it is Broken. Return whether it succeeded."""
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
        """Read all text: content, and `calls` after each `begin`. Surrounding space belongs to the calls."""
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
        """Read calls and return whether any began. If it breaks before the first one, the first `least` characters are
        content. If it breaks later, calls stay as parsed and the rest is content, or is dropped if the text ends within
        a call."""
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
