"""Bodies of the Anthropic routes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from freehold.errors import InvalidParameter
from freehold.sampling_params import SamplingParams
from freehold.server.requests.hints import CacheControl
from freehold.server.requests.unsupported import StrictBody


class TextBlock(BaseModel):
    model_config = ConfigDict(extra="ignore")

    type: str
    text: str | None = None
    cache_control: CacheControl | None = None


class AnthropicMessage(BaseModel):
    role: Literal["user", "assistant", "system"]
    content: str | list[TextBlock]


class CountBody(StrictBody):
    model_config = ConfigDict(extra="ignore")

    model: str
    messages: list[AnthropicMessage] = Field(min_length=1)
    system: str | list[TextBlock] | None = None

    def turns(self) -> list[dict[str, Any]]:
        """For the chat template: what is said to the system leads, merged, then the others in order. Raises
        InvalidParameter for content that is not text."""
        systems = [text_of(self.system, "system")] if self.system else []
        turns: list[dict[str, Any]] = []
        for message in self.messages:
            text = text_of(message.content, "messages")
            if message.role == "system":
                systems.append(text)
            else:
                turns.append({"role": message.role, "content": text})
        if not turns:
            raise InvalidParameter("messages", "must have a message that is not the system's")
        return [{"role": "system", "content": "\n\n".join(systems)}, *turns] if systems else turns

    def up_to_breakpoint(self) -> tuple[CountBody, CacheControl] | None:
        """The body up to its last block with `cache_control`, if there is one."""
        for i in range(len(self.messages) - 1, -1, -1):
            message = self.messages[i]
            if (found := _last_marked(message.content)) is not None:
                blocks, control = found
                last = message.model_copy(update={"content": blocks})
                return CountBody(model=self.model, system=self.system, messages=[*self.messages[:i], last]), control
        if (found := _last_marked(self.system)) is not None:
            # A chat needs a message: one that no prompt begins with, so that the common part is the system's.
            nobody = AnthropicMessage(role="user", content="\x00")
            return CountBody(model=self.model, system=found[0], messages=[nobody]), found[1]
        return None


def _last_marked(content: str | list[TextBlock] | None) -> tuple[list[TextBlock], CacheControl] | None:
    """The blocks up to the last that is marked, and the mark."""
    for j in range(len(content) - 1, -1, -1) if isinstance(content, list) else ():
        control = content[j].cache_control  # pyright: ignore
        if control is not None:
            return content[: j + 1], control  # pyright: ignore
    return None


class MessagesBody(CountBody):
    max_tokens: int = Field(gt=0)
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None

    def sampling(self, defaults: dict[str, Any]) -> SamplingParams:
        """Raises InvalidParameter."""
        if self.tools:
            raise InvalidParameter("tools", "tool calls are not supported")
        names = ("temperature", "top_p", "top_k")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        stop = tuple(self.stop_sequences or ())
        return SamplingParams(**{**defaults, **given}, max_tokens=self.max_tokens, stop=stop)


def text_of(content: str | list[TextBlock], field: str) -> str:
    """Joined text. Raises InvalidParameter for other kinds of blocks."""
    if isinstance(content, str):
        return content
    other = [block.type for block in content if block.type != "text"]
    if other:
        raise InvalidParameter(field, f"content of type '{other[0]}' is not supported, only text")
    return "".join(block.text or "" for block in content)
