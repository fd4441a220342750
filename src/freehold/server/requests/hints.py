"""Cache hints of each API, all converted to one retention record."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from freehold.contract.arrays import Int32
from freehold.contract.errors import ChatTemplateError, InvalidParameter
from freehold.contract.whole import WHOLE_MAX
from freehold.ipc.async_engine import AsyncEngine
from freehold.memory import Retention
from freehold.memory.prefix.retention import PRIORITY_MAX, TTL_MAX, TTL_MIN
from freehold.server.requests.prompt import Rendering
from freehold.server.requests.unsupported import StrictBody

SECONDS_OF = {"s": 1, "m": 60, "h": 3600, "d": 86400}
RESUME_PRIORITY = 80
BREAKPOINT_PRIORITY = 50
KEY_PRIORITY = 10  # for prompts with only a key: similar requests are likely
DEFAULT_TTL = "5m"


class RetentionBody(BaseModel):
    """Our own hint: retain the first `tokens` (default: all, output included) at `priority` for `ttl` seconds. `next`
    is an agent's next move: it will `resume` after a tool call, or is `done`."""

    model_config = ConfigDict(extra="forbid")

    priority: int | None = Field(default=None, ge=1, le=PRIORITY_MAX)
    ttl: float = Field(default=300.0, ge=TTL_MIN, le=TTL_MAX)
    tokens: int | None = Field(default=None, ge=0, le=WHOLE_MAX)
    next: Literal["resume", "done"] | None = None

    def retention(self) -> Retention:
        if self.next == "done":
            return Retention(priority=0)
        default = RESUME_PRIORITY if self.next == "resume" else BREAKPOINT_PRIORITY
        return Retention(self.priority or default, self.ttl, self.tokens)


class PromptCacheOptions(BaseModel):
    """OpenAI's hint. `explicit` keeps only what precedes the breakpoints in the messages."""

    ttl: str | None = None
    mode: Literal["implicit", "explicit"] | None = None


class CacheControl(BaseModel):
    """Anthropic's hint on a block: keep everything before its end."""

    type: str = "ephemeral"
    ttl: str | None = None

    def retention(self, end: int) -> Retention:
        return Retention(BREAKPOINT_PRIORITY, seconds(self.ttl or DEFAULT_TTL, "cache_control.ttl"), end)


class CacheHints(StrictBody):
    """Cache fields of OpenAI's routes. A key groups requests but does not isolate them: that is `cache_salt`."""

    retention: RetentionBody | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: str | None = None

    def retained(self, prompt_length: int | None, breakpoint: int | None = None) -> Retention | None:
        """Return the retention record. `breakpoint` is the last explicit one; `prompt_length` None means all tokens,
        output included. Raises InvalidParameter."""
        if self.retention is not None:
            return self.retention.retention()
        options = self.prompt_cache_options or PromptCacheOptions()
        explicit = options.mode == "explicit"
        if explicit and breakpoint is None:
            return None
        end = breakpoint if explicit and breakpoint is not None else prompt_length
        if self.prompt_cache_options is not None or breakpoint is not None:
            ttl = seconds(options.ttl or "30m", "prompt_cache_options.ttl")
            return Retention(BREAKPOINT_PRIORITY, ttl, end)
        if self.prompt_cache_retention is not None:
            name = "prompt_cache_retention"
            given = self.prompt_cache_retention
            ttl = seconds(DEFAULT_TTL if given.replace("-", "_") == "in_memory" else given, name)
            return Retention(BREAKPOINT_PRIORITY, ttl, end)
        return None if self.prompt_cache_key is None else Retention(KEY_PRIORITY, end=end)


def seconds(duration: str, field: str) -> float:
    """Convert a duration: 30m is 1800. Raises InvalidParameter."""
    found = re.fullmatch(r"(\d{1,6})([smhd])", duration)
    value = int(found[1]) * SECONDS_OF[found[2]] if found else 0
    if not 0 < value <= TTL_MAX:
        raise InvalidParameter(field, f"must be a duration such as 30m or 1h, at most 7d, got '{duration}'")
    return float(value)


async def tokens_before(
    engine: AsyncEngine, prompt: Int32, rendering: Rendering, messages: list[dict[str, Any]]
) -> int:
    """Return how many tokens of the chat `prompt` int32 [n] precede the end of its first `messages`."""
    try:
        start = await replace(rendering, add_generation_prompt=False, continues_answer=False).tokens(engine, messages)
    except ChatTemplateError:
        return len(prompt)  # the template can't render so few messages: keep all
    count = min(len(start), len(prompt))
    differ = np.flatnonzero(start[:count] != prompt[:count])
    return int(differ[0]) if len(differ) else count
