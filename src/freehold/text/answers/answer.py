"""An answer, as far as it has come."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from freehold.text.answers.events import CallStart, Content, Event, Reasoning


@dataclass
class Call:
    """Of a tool. `arguments` is JSON, an object if the answer was not cut."""

    id: str
    name: str
    arguments: str = ""

    def as_openai(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass
class Answer:
    """What the events of one output come to."""

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
        """As a chat template takes it. Fields without a value are left out."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message |= {"reasoning_content": self.reasoning, "reasoning": self.reasoning}
        if self.calls:
            message["tool_calls"] = [call.as_openai() for call in self.calls]
        return message
