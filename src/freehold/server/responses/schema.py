"""The body of POST /v1/responses."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from freehold.contract.constraint import Constraint
from freehold.contract.errors import InvalidParameter
from freehold.contract.sampling_params import LOGPROBS_MAX, SamplingParams
from freehold.server.answers.tools import Offer, offer_of
from freehold.server.constraints.fields import ConstraintFields
from freehold.server.openai.schema import Seconds
from freehold.server.requests.hints import CacheHints


class TextOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")

    format: dict[str, Any] | None = None


class ReasoningOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")

    effort: str | None = None
    summary: str | None = None


class ResponsesBody(CacheHints):
    """The body. A null means: not given."""

    model_config = ConfigDict(extra="ignore")

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = True
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    max_output_tokens: int | None = Field(default=None, gt=0)
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=LOGPROBS_MAX)
    seed: int | None = None
    stream: bool | None = False
    metadata: dict[str, Any] | None = None
    truncation: Literal["disabled", "auto"] | None = "disabled"
    include: list[str] | None = None
    background: bool | None = False
    conversation: str | dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: int | None = None
    timeout: Seconds | None = None
    user: str | None = None

    def check(self) -> None:
        """Raise InvalidParameter for unsupported options."""
        if self.background:
            raise InvalidParameter("background", "is not supported: read the stream")
        if self.conversation is not None:
            raise InvalidParameter("conversation", "is not supported, use previous_response_id")
        if self.truncation == "auto":
            raise InvalidParameter("truncation", "must be disabled: nothing is left out of a prompt")

    def sampling(self, defaults: dict[str, Any]) -> SamplingParams:
        """Return the sampling parameters. Raises InvalidParameter."""
        given = {name: value for name in ("temperature", "top_p", "seed") if (value := getattr(self, name)) is not None}
        return SamplingParams(**{**defaults, **given}, max_tokens=self.max_output_tokens)

    def offer(self) -> Offer:
        """Return the offered tools. Raises InvalidParameter."""
        chat = [
            {"type": tool.get("type"), "function": {name: value for name, value in tool.items() if name != "type"}}
            if tool.get("type") == "function" and "function" not in tool
            else tool
            for tool in self.tools or ()
        ]
        return offer_of(chat, self.tool_choice, self.parallel_tool_calls)

    def form(self) -> Constraint | None:
        """Return the constraint on the text. Raises InvalidParameter."""
        given = None if self.text is None else self.text.format
        if given is None:
            return None
        if given.get("type") == "json_schema":
            named = {name: value for name, value in given.items() if name != "type"}
            given = {"type": "json_schema", "json_schema": named}
        try:
            return ConstraintFields(response_format=given).constraint()
        except InvalidParameter as error:
            where = (error.field or "").replace("response_format.json_schema", "text.format")
            raise InvalidParameter(
                where.replace("response_format", "text.format"), error.message.partition(": ")[2]
            ) from None
