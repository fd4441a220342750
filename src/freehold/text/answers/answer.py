"""An answer, as received so far."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from freehold.text.answers.events import CallStart, Content, Event, Reasoning


@dataclass
class Call:
    """A tool call. `arguments` is a JSON object unless the answer was truncated."""

    id: str
    name: str
    arguments: str = ""

    def as_openai(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass
class Answer:
    """The result of one output's events."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list[Call])

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Content):
                self.content += event.text
            elif isinstance(event, Reasoning):
                self.reasoning += event.text
            elif isinstance(event, CallStart):
                self.calls.append(Call(event.id, event.name))
            else:
                self.calls[event.index].arguments += event.text

    def as_message(self) -> dict[str, Any]:
        """Return the answer as a chat template's message. Empty fields are omitted."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message |= {"reasoning_content": self.reasoning, "reasoning": self.reasoning}
        if self.calls:
            message["tool_calls"] = [call.as_openai() for call in self.calls]
        return message
