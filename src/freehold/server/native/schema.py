"""Request bodies of the native routes, field-compatible with SGLang's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from freehold.contract.errors import InvalidParameter
from freehold.contract.sampling_params import LOGPROBS_MAX, SamplingParams
from freehold.contract.whole import WHOLE_MAX
from freehold.server.constraints.fields import native_constraint
from freehold.server.openai.schema import Seconds, TokenIds
from freehold.server.requests.hints import RetentionBody

PASSED_ON = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "n",
    "ignore_eos",
)  # fmt: skip
NATIVE_CONSTRAINTS = ("json_schema", "regex", "ebnf", "structural_tag")


class NativeSampling(BaseModel):
    """`sampling_params`. Unlike in other bodies, unknown keys are refused. A null means: not given."""

    model_config = ConfigDict(extra="forbid")

    max_new_tokens: int | None = Field(default=128, ge=0, le=WHOLE_MAX)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    min_new_tokens: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = True
    spaces_between_special_tokens: bool | None = True
    no_stop_trim: bool | None = False
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    logit_bias: dict[str, float] | None = None
    sampling_seed: int | None = None
    custom_params: dict[str, Any] | None = None

    def params(self, probe: Probe | None) -> SamplingParams:
        """Return the parameters that don't depend on the prompt. Raises InvalidParameter."""
        given = {name: value for name in PASSED_ON if (value := getattr(self, name)) is not None}
        try:
            biases = {int(token): bias for token, bias in (self.logit_bias or {}).items()}
        except ValueError:
            raise InvalidParameter("logit_bias", "keys must be token ids") from None
        return SamplingParams(
            **given,
            max_tokens=None,
            min_tokens=self.min_new_tokens or 0,
            seed=self.sampling_seed,
            stop=_strings(self.stop),
            stop_regex=_strings(self.stop_regex),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logit_bias=biases,
            include_stop=bool(self.no_stop_trim),
            logprobs=None if probe is None else max(probe.top, 1),
            logprob_token_ids=() if probe is None else probe.token_ids,
            prompt_logprobs_start=None if probe is None or probe.start < 0 else probe.start,
            constraint=native_constraint({name: getattr(self, name) for name in NATIVE_CONSTRAINTS}),
        )

    def fitted(self, params: SamplingParams, room: int) -> SamplingParams:
        """Limit output to `room`, the context left for it. If no output is wanted, one token is computed and not
        shown."""
        wanted = max(room if self.max_new_tokens is None else min(self.max_new_tokens, room), 1)
        return replace(params, max_tokens=wanted, min_tokens=min(params.min_tokens, wanted))


def _strings(given: str | list[str] | None) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given or ())


@dataclass(frozen=True)
class Probe:
    """The log-probabilities to report for a prompt: from position `start` (-1: output only), the `top` best tokens and
    `token_ids`."""

    start: int
    top: int
    token_ids: tuple[int, ...]


class SessionParams(BaseModel):
    """Which session, and for branching ones, which point to continue."""

    id: str | None = None
    rid: str | None = None
    offset: int | None = None
    replace: bool | None = False
    drop_previous_output: bool | None = False


class GenerateBody(BaseModel):
    """The body of /generate. Lists have one entry per prompt."""

    model_config = ConfigDict(extra="ignore")

    text: str | list[str] | None = None
    input_ids: TokenIds | list[TokenIds] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    stream: bool | None = False
    return_logprob: bool | list[bool] | None = False
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    token_ids_logprob: list[int] | list[list[int]] | None = None
    return_text_in_logprobs: bool | None = False
    rid: str | list[str] | None = None
    lora_path: str | None = None
    session_params: SessionParams | None = None
    priority: int | None = None
    cache_salt: str | None = None
    retention: RetentionBody | None = None
    timeout: Seconds | None = None

    def prompts(self) -> tuple[list[str] | list[list[int]], bool]:
        """Return the prompts and whether a list was given. Raises InvalidParameter."""
        if (self.text is None) == (self.input_ids is None):
            raise InvalidParameter("text", "give exactly one of text and input_ids")
        if self.text == []:
            raise InvalidParameter("text", "must have at least one prompt")
        if self.text is not None:
            return ([self.text], False) if isinstance(self.text, str) else (self.text, True)
        ids: Any = self.input_ids
        is_list = bool(ids) and isinstance(ids[0], list)
        return (ids, True) if is_list else ([ids], False)

    def each(self, name: str, count: int, default: Any) -> list[Any]:
        """Return a field's value for each of `count` prompts. Raises InvalidParameter."""
        value = getattr(self, name)
        if not isinstance(value, list) or (name == "token_ids_logprob" and value and isinstance(value[0], int)):
            return [default if value is None else value] * count
        if len(value) != count:
            raise InvalidParameter(name, f"has {len(value)} entries for {count} prompts")
        return [default if one is None else one for one in value]

    def sampling(self, count: int) -> list[NativeSampling]:
        """Return the sampling of each prompt. Raises InvalidParameter naming the field."""
        try:
            parsed = [NativeSampling(**one) for one in self.each("sampling_params", count, {})]
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"]))
            raise InvalidParameter(f"sampling_params.{field}", first["msg"]) from None
        if len({one.n or 1 for one in parsed}) > 1:
            raise InvalidParameter("n", "must be equal for all prompts of a batch")
        return parsed

    def probes(self, count: int, vocab_size: int) -> list[Probe | None]:
        """Return each prompt's probe, None for no log-probabilities. Raises InvalidParameter."""
        names = ("return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob")
        each = zip(*(self.each(*one) for one in zip(names, [count] * 4, (False, -1, 0, []), strict=True)), strict=True)
        probes: list[Probe | None] = []
        for wanted, start, top, ids in each:
            if not 0 <= top <= LOGPROBS_MAX:
                raise InvalidParameter("top_logprobs_num", f"must be between 0 and {LOGPROBS_MAX}, got {top}")
            if start < -1:
                raise InvalidParameter("logprob_start_len", f"must be -1 or a position, got {start}")
            outside = [token for token in ids if not 0 <= token < vocab_size]
            if outside:
                raise InvalidParameter("token_ids_logprob", f"token id {outside[0]} is outside the vocabulary")
            start = -1 if self.session_params is not None and self.session_params.id is not None else start
            probes.append(Probe(start, top, tuple(ids)) if wanted else None)
        return probes


class AbortBody(BaseModel):
    rid: str | None = ""
    abort_all: bool | None = False


class OpenSessionBody(BaseModel):
    capacity_of_str_len: int
    session_id: str | None = None
    streaming: bool | None = False
    timeout: Seconds | None = None


class CloseSessionBody(BaseModel):
    session_id: str
