"""Chat templates: Jinja programs that come with a model, run in a sandbox."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from freehold.errors import ChatTemplateError


class ChatTemplate:
    """Renders messages as transformers does: same environment, same functions."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        self.source = source
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Raises ChatTemplateError with the template's own words."""
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                **{**self._special_tokens, **variables},
            )
        except (jinja2.TemplateError, TypeError, KeyError) as error:
            raise ChatTemplateError(f"messages: the model's chat template failed: {error}") from error


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
