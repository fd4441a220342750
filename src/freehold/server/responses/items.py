"""Items of the Responses API, converted to chat messages."""

from __future__ import annotations

import uuid
from typing import Any, NoReturn

from freehold.contract.errors import InvalidParameter

TEXTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")
ROLES = ("system", "developer", "user", "assistant")


def items_of(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the client's items, each with an id and a type. Raises InvalidParameter."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not given:
        _refuse("input", "must not be empty")
    return [{"type": "message", "id": f"msg_{uuid.uuid4().hex}", **item} for item in given]


def messages_of(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert items for a chat template. Consecutive assistant items (thoughts, text, calls) become one message. Raises
    InvalidParameter."""
    messages: list[dict[str, Any]] = []
    is_open = False  # whether the last message is an assistant's and may grow
    for i, item in enumerate(items):
        where, kind = f"input[{i}]", item["type"]
        if kind == "function_call_output":
            result = _text(item.get("output"), f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": _id(item, where), "content": result})
            is_open = False
            continue
        is_assistants = kind in ("reasoning", "function_call") or item.get("role") == "assistant"
        if is_assistants and not is_open:
            messages.append({"role": "assistant", "content": ""})
        is_open = is_assistants
        if kind == "reasoning":
            thoughts = _text(item.get("content") or item.get("summary") or [], f"{where}.content")
            messages[-1] |= {"reasoning_content": thoughts, "reasoning": thoughts}
        elif kind == "function_call":
            messages[-1].setdefault("tool_calls", []).append(_call(item, where))
        elif kind != "message":
            _refuse(f"{where}.type", f"items of type '{kind}' are not supported")
        elif is_assistants:
            messages[-1]["content"] += _text(item.get("content"), f"{where}.content")
        elif item.get("role") in ROLES:
            messages.append({"role": item["role"], "content": _text(item.get("content"), f"{where}.content")})
        else:
            _refuse(f"{where}.role", f"must be one of {', '.join(ROLES)}")
    return messages


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        _refuse(where, "must be a string or a list of parts")
    found: list[str] = []
    for part in content:  # pyright: ignore[reportUnknownVariableType]
        kind: Any = part.get("type") if isinstance(part, dict) else None  # pyright: ignore
        if kind not in TEXTS:
            _refuse(where, f"content of type '{kind}' is not supported, only text")
        found.append(str(part.get("text") or part.get("refusal") or ""))  # pyright: ignore
    return "".join(found)


def _call(item: dict[str, Any], where: str) -> dict[str, Any]:
    function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
    return {"id": _id(item, where), "type": "function", "function": function}


def _id(item: dict[str, Any], where: str) -> str:
    if not isinstance(item.get("call_id"), str):
        _refuse(f"{where}.call_id", "must be the id of a call")
    return item["call_id"]


def _refuse(field: str, why: str) -> NoReturn:
    raise InvalidParameter(field, why)
