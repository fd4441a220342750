"""Answers as items of the Responses API, whole and as events."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from freehold.text.answers.events import Arguments, CallStart, Content, Event, Reasoning

_Events = list[dict[str, Any]]


class OutputItems:
    """Builds the items of one output. Each item is done before the next one is added. `sequence_number` counts all
    events of a response."""

    def __init__(self, name: str):
        self._name = name.removeprefix("resp_")
        self._number = 0
        self._kind: type[Event] | None = None  # type of the current item
        self.items: list[dict[str, Any]] = []

    def event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Return an event with the next sequence number."""
        self._number += 1
        return {"type": f"response.{kind}", "sequence_number": self._number - 1, **fields}

    def add(self, events: Iterable[Event]) -> _Events:
        """Add events. Return the stream's events."""
        said: _Events = []
        for event in events:
            kind = CallStart if isinstance(event, Arguments) else type(event)
            if isinstance(event, CallStart) or kind is not self._kind:
                said += [*self.finish(), *self._begin(event)]
                self._kind = kind
            if not isinstance(event, CallStart):
                said.append(self._say(event))
        return said

    def _begin(self, event: Event) -> _Events:
        name = f"{len(self.items)}_{self._name}"
        part: dict[str, Any] | None = None
        item: dict[str, Any]
        if isinstance(event, CallStart):
            call = {"call_id": event.id, "name": event.name, "arguments": ""}
            item = {"type": "function_call", "id": f"fc_{name}", "status": "in_progress", **call}
        elif isinstance(event, Reasoning):
            part = {"type": "reasoning_text", "text": ""}
            item = {"type": "reasoning", "id": f"rs_{name}", "status": "in_progress", "summary": [], "content": []}
        else:
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"type": "message", "id": f"msg_{name}", "status": "in_progress", "role": "assistant", "content": []}
        self.items.append(item)
        added = [self.event("output_item.added", output_index=len(self.items) - 1, item=dict(item))]
        if part is not None:
            added.append(self.event("content_part.added", **self._where, content_index=0, part=dict(part)))
            item["content"] = [part]
        return added

    @property
    def _where(self) -> dict[str, Any]:
        return {"output_index": len(self.items) - 1, "item_id": self.items[-1]["id"]}

    def _say(self, event: Content | Reasoning | Arguments) -> dict[str, Any]:
        item = self.items[-1]
        if isinstance(event, Arguments):
            item["arguments"] += event.text
            return self.event("function_call_arguments.delta", **self._where, delta=event.text)
        item["content"][0]["text"] += event.text
        if isinstance(event, Reasoning):
            return self.event("reasoning_text.delta", **self._where, content_index=0, delta=event.text)
        return self.event("output_text.delta", **self._where, content_index=0, delta=event.text, logprobs=[])

    def finish(self, is_whole: bool = True) -> _Events:
        """Finish the current item, if any."""
        if self._kind is None:
            return []
        self._kind = None
        item = self.items[-1]
        item["status"] = "completed" if is_whole else "incomplete"
        if item["type"] == "function_call":
            said = {"name": item["name"], "arguments": item["arguments"]}
            done = [self.event("function_call_arguments.done", **self._where, **said)]
        else:
            (part,) = item["content"]
            kind, more = ("reasoning_text", {}) if item["type"] == "reasoning" else ("output_text", {"logprobs": []})
            done = [
                self.event(f"{kind}.done", **self._where, content_index=0, text=part["text"], **more),
                self.event("content_part.done", **self._where, content_index=0, part=part),
            ]
        return [*done, self.event("output_item.done", output_index=len(self.items) - 1, item=item)]
