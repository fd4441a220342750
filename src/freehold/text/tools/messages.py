"""Tools and calls as text, in the format `hermes`, for chat templates without tool support."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]

_INSTRUCTIONS = """You can call functions. Here is what they are called and what they take, one JSON object a line:
<tools>
{tools}
</tools>
To call one, write its name and its arguments as JSON between tags, and nothing after that:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>"""


def with_tools_as_text(
    messages: Messages, tools: Sequence[Mapping[str, Any]], takes_system: bool = True
) -> list[dict[str, Any]]:
    """Return messages for a template without tool support. Tools are explained in the system message, or without one in
    the first message; calls and results become text."""
    plain: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            _add_result(plain, message)
        else:
            plain.append(_with_calls_as_text(message))
    return _explained(plain, tools, takes_system) if tools else plain


def _explained(
    messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], takes_system: bool
) -> list[dict[str, Any]]:
    text = _INSTRUCTIONS.format(tools="\n".join(json.dumps(tool.get("function"), ensure_ascii=False) for tool in tools))
    if not messages:
        return [{"role": "system" if takes_system else "user", "content": text}]
    first = messages[0]
    if not takes_system:
        return [{**first, "content": f"{text}\n\n{first.get('content') or ''}"}, *messages[1:]]
    if first["role"] not in ("system", "developer"):
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": f"{first['content']}\n\n{text}".lstrip()}, *messages[1:]]


def _with_calls_as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in message.items() if name != "tool_calls"}
    parts = [message["content"]] if message.get("content") else []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        body = json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
        parts.append(f"<tool_call>\n{body}\n</tool_call>")
    return {**plain, "content": "\n".join(parts)}


def _add_result(messages: list[dict[str, Any]], message: Mapping[str, Any]) -> None:
    """Add a result as a user message. Consecutive results are merged."""
    text = f"<tool_response>\n{message['content']}\n</tool_response>"
    if messages and messages[-1].get("is_result"):
        messages[-1] = {**messages[-1], "content": f"{messages[-1]['content']}\n{text}"}
    else:
        messages.append({"role": "user", "content": text, "is_result": True})
