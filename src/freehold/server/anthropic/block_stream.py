"""Answers as content blocks."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from freehold.text.answers.answer import Answer
from freehold.text.answers.events import Arguments, CallStart, Content, Event, Reasoning


class BlockStream:
    """Builds the blocks of one output. Each block stops before the next one starts; thoughts, texts and calls stay in
    order."""

    def __init__(self) -> None:
        self._answer = Answer()
        self._open: type[Event] | None = None  # type of the current block
        self._blocks: list[dict[str, Any]] = []

    @property
    def has_calls(self) -> bool:
        return bool(self._answer.calls)

    def add(self, events: Iterable[Event]) -> list[dict[str, Any]]:
        """Add events. Return the stream's events."""
        said: list[dict[str, Any]] = []
        for event in events:
            self._answer.add([event])
            if isinstance(event, CallStart):
                said += self._start(CallStart, _tool_use(event))
            elif isinstance(event, Arguments):
                said.append(self._delta("input_json_delta", "partial_json", event.text))
            else:
                said += self._say(event)
        return said

    def _say(self, event: Content | Reasoning) -> list[dict[str, Any]]:
        is_thought = isinstance(event, Reasoning)
        started: list[dict[str, Any]] = []
        if self._open is not type(event):
            empty = (
                {"type": "thinking", "thinking": "", "signature": ""} if is_thought else {"type": "text", "text": ""}
            )
            started = self._start(type(event), empty)
        name = "thinking" if is_thought else "text"
        self._blocks[-1][name] += event.text
        return [*started, self._delta(f"{name}_delta", name, event.text)]

    def _start(self, opened: type[Event], block: dict[str, Any]) -> list[dict[str, Any]]:
        stopped = self._stop()
        self._open = opened
        self._blocks.append(dict(block))
        return [*stopped, {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block}]

    def _delta(self, kind: str, name: str, text: str) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": {"type": kind, name: text}}

    def _stop(self) -> list[dict[str, Any]]:
        if self._open is None:
            return []
        self._open = None
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def finish(self) -> list[dict[str, Any]]:
        """Close the output. An empty answer becomes an empty text."""
        if self._blocks:
            return self._stop()
        return [*self._start(Content, {"type": "text", "text": ""}), *self._stop()]

    def whole(self) -> list[dict[str, Any]]:
        """Return all blocks of a complete answer."""
        calls = iter(self._answer.calls)
        found = [
            {**block, "input": _input(next(calls).arguments)} if block["type"] == "tool_use" else block
            for block in self._blocks
        ]
        return found or [{"type": "text", "text": ""}]


def _tool_use(event: CallStart) -> dict[str, Any]:
    return {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}


def _input(arguments: str) -> Any:
    """Parse a call's arguments. A truncated call has none."""
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return {}
