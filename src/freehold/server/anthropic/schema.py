"""Request bodies of the Anthropic routes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from freehold.contract.errors import InvalidParameter
from freehold.contract.sampling_params import SamplingParams
from freehold.server.answers.tools import Offer, offered, tool_of
from freehold.server.anthropic.blocks import Block, messages_of, text_of
from freehold.server.requests.hints import CacheControl
from freehold.server.requests.unsupported import StrictBody


class AnthropicMessage(BaseModel):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolChoice(BaseModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = False


class ThinkingOption(BaseModel):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class CountBody(StrictBody):
    model_config = ConfigDict(extra="ignore")

    model: str
    messages: list[AnthropicMessage] = Field(min_length=1)
    system: str | list[Block] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingOption | None = None

    def turns(self) -> list[dict[str, Any]]:
        """Return the turns for the chat template: system messages first, merged, then the others in order. Raises
        InvalidParameter for unsupported content."""
        systems = [text_of(self.system, "system")] if self.system else []
        turns: list[dict[str, Any]] = []
        for i, message in enumerate(self.messages):
            if message.role == "system":
                systems.append(text_of(message.content, f"messages[{i}].content"))
            else:
                turns += messages_of(message.role, message.content, f"messages[{i}].content")
        if not turns:
            raise InvalidParameter("messages", "must have a message that is not the system's")
        return [{"role": "system", "content": "\n\n".join(systems)}, *turns] if systems else turns

    def offer(self) -> Offer:
        """Return the offered tools. Raises InvalidParameter."""
        choice = self.tool_choice or ToolChoice(type="auto")
        if not self.tools:
            if choice.type in ("any", "tool"):
                raise InvalidParameter("tool_choice", "needs tools")
            return Offer()
        if choice.type == "tool" and choice.name is None:
            raise InvalidParameter("tool_choice.name", "must name a tool")
        known = [self._tool(given, f"tools[{i}]") for i, given in enumerate(self.tools)]
        shown = [
            {"type": "function", "function": {
                "name": tool.name, "description": tool.description, "parameters": tool.parameters}}
            for tool in known
        ]  # fmt: skip
        kind = {"any": "required", "tool": "required"}.get(choice.type, choice.type)
        name = choice.name if choice.type == "tool" else None
        return offered(known, shown, kind, name, not choice.disable_parallel_tool_use)

    @staticmethod
    def _tool(given: dict[str, Any], where: str) -> Any:
        kind = given.get("type") or "custom"
        if kind != "custom":
            raise InvalidParameter(f"{where}.type", f"tools of type '{kind}' are not supported")
        return tool_of(given, where, "input_schema")

    @property
    def template_variables(self) -> dict[str, Any]:
        """Chat template variables of reasoning models."""
        return {} if self.thinking is None else {"enable_thinking": self.thinking.type != "disabled"}

    def up_to_breakpoint(self) -> tuple[CountBody, CacheControl] | None:
        """Return the body up to its last block with `cache_control`, or None."""
        for i in range(len(self.messages) - 1, -1, -1):
            message = self.messages[i]
            if (found := _last_marked(message.content)) is not None:
                blocks, control = found
                last = message.model_copy(update={"content": blocks})
                return CountBody(model=self.model, system=self.system, messages=[*self.messages[:i], last]), control
        if (found := _last_marked(self.system)) is not None:
            # A chat needs a message: this one matches no prompt, so that the common part ends with the system's.
            nobody = AnthropicMessage(role="user", content="\x00")
            return CountBody(model=self.model, system=found[0], messages=[nobody]), found[1]
        return None


def _last_marked(content: str | list[Block] | None) -> tuple[list[Block], CacheControl] | None:
    """Return the blocks up to the last marked one, and its mark."""
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

    def sampling(self, defaults: dict[str, Any]) -> SamplingParams:
        """Return the sampling parameters. Raises InvalidParameter."""
        names = ("temperature", "top_p", "top_k")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        stop = tuple(self.stop_sequences or ())
        return SamplingParams(**{**defaults, **given}, max_tokens=self.max_tokens, stop=stop)

    @property
    def thinking_budget(self) -> int | None:
        """Budget in tokens. Raises InvalidParameter."""
        if self.thinking is None or self.thinking.type != "enabled" or self.thinking.budget_tokens is None:
            return None
        if not 1 <= self.thinking.budget_tokens < self.max_tokens:
            raise InvalidParameter("thinking.budget_tokens", "must be at least 1 and less than max_tokens")
        return self.thinking.budget_tokens
