"""Tool calls and their results in client messages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from freehold.contract.errors import InvalidParameter


def check_calls(
    messages: Sequence[Mapping[str, Any]], history: Iterable[Mapping[str, Any]] = (), field: str | None = None
) -> None:
    """Check tool calls and results. `history`: earlier messages known to the server. Raises InvalidParameter for a
    malformed call or a result without a call; it names the message, or the body's `field` that holds them."""
    asked = {call["id"] for message in history for call in message.get("tool_calls") or () if "id" in call}
    for i, message in enumerate(messages):
        where = field or f"messages[{i}]"
        for j, call in enumerate(message.get("tool_calls") or ()):
            asked.add(_checked(call, f"{where}.tool_calls[{j}]"))
        name = message.get("tool_call_id")
        if message["role"] == "tool" and name is not None and name not in asked:
            _refuse(f"{where}.tool_call_id", f"no call before it has the id '{name}'")


def _checked(call: Any, where: str) -> str | None:
    """Check one call. Return its id, if it has one."""
    function: Any = call.get("function") if isinstance(call, dict) else None  # pyright: ignore
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):  # pyright: ignore
        _refuse(f"{where}.function", "must be an object with a name and arguments")
    arguments: Any = function.get("arguments", {})  # pyright: ignore
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            _refuse(f"{where}.function.arguments", f"is not JSON: {error}")
    if not isinstance(arguments, dict):
        _refuse(f"{where}.function.arguments", "must be a JSON object")
    name: Any = call.get("id")  # pyright: ignore
    if name is not None and not isinstance(name, str):
        _refuse(f"{where}.id", "must be a string")
    return name


def with_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with its thoughts under both names that templates use."""
    thoughts = message.get("reasoning_content") or message.get("reasoning")
    if not isinstance(thoughts, str):
        return message
    return {**message, "reasoning_content": thoughts, "reasoning": thoughts}


def _refuse(field: str, why: str) -> NoReturn:
    raise InvalidParameter(field, why)
