"""Request bodies of the OpenAI routes. Unknown fields are ignored, wrong values refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from freehold.config import EngineConfig
from freehold.contract.errors import InvalidParameter
from freehold.contract.sampling_params import LOGPROBS_MAX, SamplingParams
from freehold.ipc.protocol import Options
from freehold.memory import Retention
from freehold.server.access.clients import Client
from freehold.server.answers.messages import check_calls, with_thoughts
from freehold.server.constraints.fields import ConstraintFields
from freehold.server.requests.hints import CacheHints
from freehold.server.requests.prompt import Rendering
from freehold.server.requests.unsupported import StrictBody

RENDERED = {"messages", "tools", "add_generation_prompt"}  # have fields of their own
TokenIds = list[Annotated[int, Field(ge=0, strict=True)]]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]  # a string may say "inf", which JSON can't represent


class StreamOptions(BaseModel):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class SamplingBody(CacheHints, ConstraintFields):
    """Fields shared by completions and chat. A null means: not given."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    lora_path: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    no_stop_trim: bool | None = False
    include_stop_str_in_output: bool | None = False
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = True
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout: Seconds | None = None
    session_id: str | None = None
    session_wait: bool | None = False
    user: str | None = None

    def sampling(
        self, defaults: dict[str, Any], max_tokens: int | None, logprobs: int | None, echo: bool = False
    ) -> SamplingParams:
        """Return the sampling parameters, with the model's defaults for missing fields. `echo` requests the prompt's
        log-probabilities too. Raises InvalidParameter."""
        names = (
            "n temperature top_p top_k min_p seed presence_penalty frequency_penalty repetition_penalty "
            "ignore_eos min_tokens"
        )
        given = {name: value for name in names.split() if (value := getattr(self, name)) is not None}
        return SamplingParams(
            **{**defaults, **given},
            max_tokens=max_tokens,
            logprobs=logprobs,
            logit_bias=_token_biases(self.logit_bias or {}),
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            stop_regex=(self.stop_regex,) if isinstance(self.stop_regex, str) else tuple(self.stop_regex or ()),
            include_stop=bool(self.no_stop_trim or self.include_stop_str_in_output),
            prompt_logprobs_start=0 if echo and logprobs is not None else None,
            constraint=self.constraint(),
        )

    def options(self, client: Client, adapter: str, retention: Retention | None) -> Options:
        """Return the options of a request outside sessions."""
        namespace = client.namespace(self.cache_salt)
        return Options(self.priority or 0, namespace, self.timeout, None, retention, adapter=adapter)

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


def _token_biases(given: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in given.items()}
    except ValueError:
        raise InvalidParameter("logit_bias", "keys must be token ids") from None


class CompletionBody(SamplingBody):
    prompt: str | TokenIds | list[str] | list[TokenIds]
    max_tokens: int | None = 16
    logprobs: int | None = Field(default=None, ge=0, le=LOGPROBS_MAX)
    echo: bool | None = False
    suffix: str | None = None
    best_of: int | None = None

    @property
    def prompts(self) -> list[str] | list[TokenIds]:
        """Each prompt separately."""
        return each_prompt(self.prompt)


def each_prompt(given: str | TokenIds | list[str] | list[TokenIds]) -> list[str] | list[TokenIds]:
    is_list = isinstance(given, list) and len(given) > 0 and not isinstance(given[0], int)
    return given if is_list else [given]  # pyright: ignore[reportReturnType]


class ContentPart(BaseModel):
    type: str
    text: str | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


class Message(BaseModel):
    """A chat message. Other fields (name, ...) are passed to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the message for the template. Raises InvalidParameter for content that is not text."""
        fields = self.model_dump(exclude_none=True)
        if isinstance(self.content, list):
            other = [part.type for part in self.content if part.type not in ("text", "input_text")]
            if other:
                raise InvalidParameter("messages", f"content of type '{other[0]}' is not supported, only text")
            fields["content"] = "".join(part.text or "" for part in self.content)
        fields.setdefault("content", "")
        return with_thoughts(fields)


def for_template(messages: list[Message], history: Iterable[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
    """Return all messages; `history`: earlier messages known to the server. Raises InvalidParameter, also for malformed
    tool calls and results without a call."""
    found = [message.for_template() for message in messages]
    check_calls(found, history)
    return found


def up_to_breakpoint(messages: list[Message]) -> list[dict[str, Any]] | None:
    """Return the messages up to the last part with an explicit cache breakpoint; None if there is none."""
    for i in range(len(messages) - 1, -1, -1):
        content = messages[i].content
        for j in range(len(content) - 1, -1, -1) if isinstance(content, list) else ():
            if content[j].prompt_cache_breakpoint is not None:  # pyright: ignore
                last = messages[i].model_copy(update={"content": content[: j + 1]})  # pyright: ignore
                return for_template([*messages[:i], last])
    return None


class ChatBody(SamplingBody):
    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0, le=LOGPROBS_MAX)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    separate_reasoning: bool | None = True
    stream_reasoning: bool | None = True
    thinking_budget: int | None = None
    add_generation_prompt: bool | None = True
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def rendering(self) -> Rendering:
        """How to apply the chat template."""
        given = {name: value for name, value in (self.chat_template_kwargs or {}).items() if name not in RENDERED}
        if self.reasoning_effort is not None:
            given.setdefault("reasoning_effort", self.reasoning_effort)
        return Rendering(self.add_generation_prompt is not False, variables=given)


class EmbeddingBody(StrictBody):
    """`pooling` and `normalize` extend OpenAI's API."""

    model_config = ConfigDict(extra="ignore")

    input: str | TokenIds | list[str] | list[TokenIds]
    model: str | None = None
    lora_path: str | None = None
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: int | None = None
    pooling: Literal["last", "mean"] | None = "last"
    normalize: bool | None = True
    priority: int | None = None
    cache_salt: str | None = None
    timeout: Seconds | None = None
    user: str | None = None

    @property
    def prompts(self) -> list[str] | list[TokenIds]:
        """Each prompt separately."""
        return each_prompt(self.input)


class TokenizeBody(BaseModel):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = True
    add_generation_prompt: bool | None = True
    return_token_strs: bool | None = False


class PauseBody(BaseModel):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class WeightsBody(BaseModel):
    model_path: str = Field(min_length=1)


class LookupBody(BaseModel):
    """Exactly one of the first three is given."""

    prompt: str | TokenIds | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    token_ids: TokenIds | None = None
    cache_salt: str | None = None
    lora_path: str | None = None


class PinBody(LookupBody):
    """`ttl` in seconds; without one the pin never expires."""

    id: str | None = Field(default=None, min_length=1, max_length=256)
    ttl: float | None = Field(default=None, gt=0, le=365 * 86400)


class StorageBody(BaseModel):
    """A storage backend, with fields named as the options."""

    hicache_storage_backend: Literal["file", "redis", "s3"]
    hicache_storage_location: str | None = None
    hicache_storage_capacity: int = Field(default=EngineConfig.hicache_storage_capacity, gt=0)
    hicache_storage_prefetch_policy: Literal["best_effort", "wait_complete", "timeout"] = "timeout"

    def backend(self) -> dict[str, Any]:
        """Return the arguments for the engine process."""
        return {
            "kind": self.hicache_storage_backend,
            "location": self.hicache_storage_location,
            "capacity_bytes": self.hicache_storage_capacity,
            "prefetch_policy": self.hicache_storage_prefetch_policy,
        }


class SaveBody(BaseModel):
    """`timeout`: maximum seconds to wait until all is saved."""

    timeout: float = Field(default=30.0, ge=0, le=600)


class SessionBody(BaseModel):
    session_id: str | None = Field(default=None, min_length=1, max_length=256)
    timeout: Seconds | None = None
    capacity: int | None = Field(default=None, gt=0)
    cache_salt: str | None = None


class ForkBody(BaseModel):
    session_id: str | None = Field(default=None, min_length=1, max_length=256)


class RewindBody(BaseModel):
    to: int = Field(ge=0)


class DetokenizeBody(BaseModel):
    model: str | None = None
    tokens: TokenIds
