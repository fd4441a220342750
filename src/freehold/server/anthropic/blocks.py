"""Content blocks of Anthropic's messages, converted to chat messages."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ConfigDict

from freehold.contract.errors import InvalidParameter
from freehold.server.requests.hints import CacheControl


class Block(BaseModel):
    """A block of any type; the type determines its fields."""

    model_config = ConfigDict(extra="ignore")

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = False
    cache_control: CacheControl | None = None


def text_of(content: str | list[Block] | None, field: str) -> str:
    """Join text blocks. Raises InvalidParameter for other kinds of blocks."""
    if content is None or isinstance(content, str):
        return content or ""
    other = [block.type for block in content if block.type != "text"]
    if other:
        raise InvalidParameter(field, f"content of type '{other[0]}' is not supported, only text")
    return "".join(block.text or "" for block in content)


def messages_of(role: str, content: str | list[Block], field: str) -> list[dict[str, Any]]:
    """Convert to OpenAI's format: tool results become messages of their own, before the rest. Raises
    InvalidParameter."""
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    results: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    texts: list[Block] = []
    thoughts = ""
    for block in content:
        if block.type == "tool_use" and role == "assistant":
            calls.append(_call(block, field))
        elif block.type == "tool_result" and role == "user":
            results.append(_result(block, field))
        elif block.type == "thinking" and role == "assistant":
            thoughts += block.thinking or ""
        elif block.type != "redacted_thinking":
            texts.append(block)
    said: dict[str, Any] = {"role": role, "content": text_of(texts, field)}
    if thoughts:
        said |= {"reasoning_content": thoughts, "reasoning": thoughts}
    if calls:
        said["tool_calls"] = calls
    has_said = bool(texts or calls or thoughts or not results)
    return [*results, said] if has_said else results


def _call(block: Block, field: str) -> dict[str, Any]:
    if block.id is None or block.name is None:
        raise InvalidParameter(field, "a tool_use needs an id and a name")
    function = {"name": block.name, "arguments": json.dumps(block.input or {}, ensure_ascii=False)}
    return {"id": block.id, "type": "function", "function": function}


def _result(block: Block, field: str) -> dict[str, Any]:
    if block.tool_use_id is None:
        raise InvalidParameter(field, "a tool_result needs a tool_use_id")
    text = text_of(block.content, field)
    return {
        "role": "tool",
        "tool_call_id": block.tool_use_id,
        "content": f"Error: {text}" if block.is_error else text,
    }
