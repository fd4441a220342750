"""Tools in a body, and its rules for their use."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from freehold.contract.errors import InvalidParameter
from freehold.text.answers.grammar import ToolUse
from freehold.text.tools.tool import Tool

TOOLS_MAX = 128
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
CHOICES = ("none", "auto", "required")


@dataclass(frozen=True)
class Offer:
    """The offered tools. `use` is None if none may be called. `shown`: tools for the chat template, as in OpenAI's
    API."""

    use: ToolUse | None = None
    shown: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


def offer_of(tools: list[dict[str, Any]] | None, choice: Any, parallel: bool | None) -> Offer:
    """Read OpenAI's `tools`, `tool_choice` and `parallel_tool_calls`. Raises InvalidParameter naming one of them."""
    if not tools:
        if choice not in (None, "none", "auto"):
            _refuse("tool_choice", "needs tools")
        return Offer()
    return offered(read_tools(tools), tools, *_chosen(choice), parallel)


def offered(
    known: Sequence[Tool], shown: list[dict[str, Any]], choice: str, name: str | None, parallel: bool | None
) -> Offer:
    """Return the offer. `choice` is one of CHOICES; `name` is the one tool that must be called. Raises
    InvalidParameter."""
    if choice == "none":
        return Offer()
    if name is not None:
        known = [tool for tool in known if tool.name == name]
        if not known:
            _refuse("tool_choice", f"names the tool '{name}', which is not one of tools")
    # A named tool is called once, as in other engines.
    return Offer(ToolUse(known, parallel is not False and name is None, choice == "required"), shown)


def read_tools(tools: list[dict[str, Any]]) -> list[Tool]:
    """Read OpenAI's `tools`. Raises InvalidParameter."""
    if len(tools) > TOOLS_MAX:
        _refuse("tools", f"has {len(tools)} tools, the limit is {TOOLS_MAX}")
    found: dict[str, Tool] = {}
    for i, given in enumerate(tools):
        where = f"tools[{i}]"
        if given.get("type", "function") != "function":
            _refuse(f"{where}.type", f"must be function: tools of type '{given['type']}' are not supported")
        function = given.get("function")
        if not isinstance(function, dict):
            _refuse(f"{where}.function", "must be an object with a name")
        tool = tool_of(function, f"{where}.function", "parameters")  # pyright: ignore[reportUnknownArgumentType]
        if tool.name in found:
            _refuse(f"{where}.function.name", f"there are two tools called '{tool.name}'")
        found[tool.name] = tool
    return list(found.values())


def tool_of(given: dict[str, Any], where: str, schema: str) -> Tool:
    """Read one tool. `schema` is the field of its argument schema. Raises InvalidParameter."""
    name, parameters = given.get("name"), given.get(schema)
    if not isinstance(name, str) or not NAME.fullmatch(name):
        _refuse(f"{where}.name", "must be 1 to 64 letters, digits, and any of _ . -")
    if parameters is not None and not isinstance(parameters, dict):
        _refuse(f"{where}.{schema}", "must be a JSON schema: an object")
    return Tool(name, given.get("description") or "", parameters or {}, given.get("strict") is True)


def _chosen(choice: Any) -> tuple[str, str | None]:
    """Return one of CHOICES, and the name of the tool that must be called."""
    if choice is None or choice in CHOICES:
        return choice or "auto", None
    name: Any = None
    if isinstance(choice, dict) and choice.get("type") == "function":  # pyright: ignore[reportUnknownMemberType]
        function: Any = choice.get("function", choice)  # pyright: ignore
        name = function.get("name") if isinstance(function, dict) else None  # pyright: ignore
    if not isinstance(name, str):
        _refuse("tool_choice", 'must be none, auto, required, or {"type": "function", "function": {"name": ...}}')
    return "required", name


def _refuse(field: str, why: str) -> NoReturn:
    raise InvalidParameter(field, why)
