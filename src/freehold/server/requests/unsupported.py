"""Other engines' fields that would change the answer. They are refused, since ignoring them would make it wrong."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, model_validator

from freehold.contract.errors import InvalidParameter

UNSUPPORTED = {
    "functions": "function calls are not supported",
    "function_call": "function calls are not supported",
    "lora_request": "is not supported: name the adapter as model, or as lora_path",
    "continue_final_message": "is not supported; in /v1/messages a last message of the assistant is continued",
    "audio": "only text is supported",
    "modalities": "only text is supported",
    "prompt_embeds": "only text and token ids are supported",
    "use_beam_search": "is not supported",
    "truncate_prompt_tokens": "is not supported",
    "bad_words": "is not supported",
    "allowed_token_ids": "is not supported",
}
TEXT_ALONE = {"modalities": ["text"]}


class StrictBody(BaseModel):
    """A body that refuses unsupported fields. Empty values count as not given."""

    @model_validator(mode="before")
    @classmethod
    def refuse_unsupported(cls, body: Any) -> Any:
        for name, why in UNSUPPORTED.items() if isinstance(body, dict) else ():
            value: Any = body.get(name)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
            if value and value != TEXT_ALONE.get(name):
                raise InvalidParameter(name, why)
        return body  # pyright: ignore[reportUnknownVariableType]
