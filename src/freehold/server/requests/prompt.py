"""Converts chat messages to the text and tokens of a prompt."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from freehold.contract.arrays import Int32
from freehold.contract.errors import InvalidParameter
from freehold.ipc.async_engine import AsyncEngine
from freehold.scheduler.request import check_token_ids
from freehold.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Rendering:
    """How to apply the model's chat template, which gets `tools`, as in OpenAI's API, and `variables`. With
    `continues_answer` a final assistant message is the start of the answer."""

    add_generation_prompt: bool = True
    continues_answer: bool = False
    variables: dict[str, Any] = field(default_factory=dict[str, Any])
    tools: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def text(self, tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> str:
        """Render messages. Raises ChatTemplateError, or InvalidParameter if the model has no template."""
        if tokenizer.chat_template is None:
            raise InvalidParameter("messages", "the model has no chat template: use /v1/completions")
        render = functools.partial(tokenizer.chat_template.render, tools=self.tools)
        if self.continues_answer and messages[-1]["role"] == "assistant":
            return render(messages[:-1], True, **self.variables) + messages[-1]["content"]
        return render(messages, self.add_generation_prompt, **self.variables)

    async def tokens(self, engine: AsyncEngine, messages: list[dict[str, Any]]) -> Int32:
        """Return the prompt int32 [n]. Raises the same, and InvalidParameter for a chat that can't fit."""
        return await engine.encode(self.text(engine.tokenizer, messages), add_special_tokens=False)


async def tokens_of(
    prompts: Sequence[str | list[int]], field: str, engine: AsyncEngine, may_be_empty: bool = False
) -> list[Int32]:
    """Return each prompt's tokens int32 [n]. `field` is the body's name for them. Raises InvalidParameter."""
    if list(prompts) in ([], [[]]):
        raise InvalidParameter(field, "must not be empty")
    try:
        found = [
            await engine.encode(one, True) if isinstance(one, str) else check_token_ids(one, engine.info.vocab_size)
            for one in prompts
        ]
    except InvalidParameter as error:
        error.field = field
        raise
    if not may_be_empty and any(len(one) == 0 for one in found):
        raise InvalidParameter(field, "must not be empty")
    return found
