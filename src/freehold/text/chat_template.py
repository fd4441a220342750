"""Chat templates: Jinja programs that come with a model, run in a sandbox."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2 import meta
from jinja2.ext import loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from freehold.contract.errors import ChatTemplateError
from freehold.text.tools.messages import with_tools_as_text


class ChatTemplate:
    """Renders messages as transformers does: same environment, same functions. Templates without support for tools get
    them as text."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        self.source = source
        self.takes_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        **variables: Any,
    ) -> str:
        """Render a chat. `messages` and `tools` as in OpenAI's API. Raises ChatTemplateError with the template's
        message."""
        prepared = [_with_arguments(message, _as_object) for message in messages]
        if not self.takes_tools:
            prepared = with_tools_as_text(prepared, tools, self._takes_system)
        elif any(message.get("tool_calls") for message in messages) and self._takes_argument_texts:
            prepared = [_with_arguments(message, _as_text) for message in prepared]
        if tools and self.takes_tools:
            variables = {**variables, "tools": tools}
        try:
            return self._rendered(prepared, add_generation_prompt, variables)
        except (jinja2.TemplateError, TypeError, KeyError, ValueError) as error:
            raise ChatTemplateError(f"messages: the model's chat template failed: {error}") from error

    def _rendered(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        return self._template.render(
            messages=messages,
            add_generation_prompt=add_generation_prompt,
            **{**self._special_tokens, **variables},
        )

    @functools.cached_property
    def _takes_argument_texts(self) -> bool:
        """Whether the template wants call arguments as text instead of objects, found by a test rendering."""
        call = {"id": "abcdefghi", "type": "function", "function": {"name": "probe", "arguments": {"quoted": "text"}}}
        messages = [
            {"role": "user", "content": "probe"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "probe", "tool_call_id": "abcdefghi", "name": "probe"},
        ]
        try:
            # An object inserted as is looks like Python's repr.
            return "{'quoted'" in self._rendered(messages, False, {"tools": [{"function": {"name": "probe"}}]})
        except Exception:  # templates may raise anything on unexpected input
            return True

    @functools.cached_property
    def _takes_system(self) -> bool:
        """Whether the template supports system messages."""
        messages = [{"role": "system", "content": "probe"}, {"role": "user", "content": "probe"}]
        try:
            return bool(self._rendered(messages, True, {}))
        except Exception:  # likewise
            return False


class _Generation(jinja2.ext.Extension):
    """Ignores `{% generation %}`, which marks training targets (transformers): it does not affect prompts."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _with_arguments(message: Mapping[str, Any], change: Callable[[Any], Any]) -> Mapping[str, Any]:
    """Return the message with its calls' arguments changed."""
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": change(call["function"].get("arguments"))}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _as_object(arguments: Any) -> Any:
    """Parse arguments. Those of a truncated answer stay text."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else _to_json(arguments)


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
