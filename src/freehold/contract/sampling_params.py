"""How the next token is chosen and when a request stops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from freehold.contract.constraint import Constraint
from freehold.contract.errors import InvalidParameter
from freehold.contract.stop_regex import check_patterns
from freehold.contract.whole import WHOLE_MAX, is_whole

LOGPROBS_MAX = 20
POOLINGS = ("last", "mean")
SAMPLES_MAX = 128
TEMPERATURE_MIN = 1e-5  # below it sampling is greedy: a logit divided by so little is no float32
REPETITION_MIN = 1e-5  # likewise


def _is_text(value: str) -> bool:
    """Whether UTF-8 can encode it."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True)
class SamplingParams:
    """Names and meanings are those of the OpenAI API, extended as in vLLM.

    `temperature` 0 is greedy, and so is less than 1e-5. `top_k` -1 or 0 keeps all tokens. `seed` makes the output a
    function of the prompt alone, whatever else is in the batch. `max_tokens` None means as many as fit. `logprobs`
    k reports the sampled token's log-probability and the k best; `logprob_token_ids` are reported too, and
    with `prompt_logprobs_start` the prompt's tokens behind that position. `include_stop` leaves what stopped
    the output in its text. `constraint` says what the output may look like. `pooling` makes an embedding of the
    prompt: of its last token, or the mean of all. Filters apply in the order penalties, logit_bias, constraint,
    temperature, top_k, top_p, min_p.

    Raises InvalidParameter, naming the field and the limit.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_regex: tuple[str, ...] = ()
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprobs_start: int | None = None
    ignore_eos: bool = False
    include_stop: bool = False
    constraint: Constraint | None = None
    pooling: str | None = None

    def __post_init__(self) -> None:
        def check(name: str, ok: bool, limit: str) -> None:
            if not ok:
                raise InvalidParameter(name, f"must be {limit}, got {getattr(self, name)!r}")

        for name in ("stop", "stop_regex"):
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, (getattr(self, name),))
        for name in ("stop", "stop_regex"):
            check(name, all(map(_is_text, getattr(self, name))), "text without lone surrogates")
        for name in ("stop", "stop_regex", "stop_token_ids", "logprob_token_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        check("n", is_whole(self.n, 1, SAMPLES_MAX), f"between 1 and {SAMPLES_MAX}")
        check("max_tokens", self.max_tokens is None or is_whole(self.max_tokens, 1), f"between 1 and {WHOLE_MAX}")
        check("min_tokens", is_whole(self.min_tokens, 0), f"between 0 and {WHOLE_MAX}")
        if self.max_tokens is not None:
            check("min_tokens", self.min_tokens <= self.max_tokens, f"at most max_tokens ({self.max_tokens})")
        check("temperature", 0.0 <= self.temperature <= 100.0, "between 0 and 100")
        if self.temperature < TEMPERATURE_MIN:
            object.__setattr__(self, "temperature", 0.0)
        check("top_k", is_whole(self.top_k, -1), f"-1 (all), 0 (all) or at most {WHOLE_MAX}")
        check("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1")
        check("min_p", 0.0 <= self.min_p <= 1.0, "between 0 and 1")
        check("seed", self.seed is None or is_whole(self.seed, -(2**63), 2**63 - 1), "a 64-bit integer")
        check(
            "repetition_penalty", REPETITION_MIN <= self.repetition_penalty <= 2.0, f"between {REPETITION_MIN:g} and 2"
        )
        check("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "between -2 and 2")
        check("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "between -2 and 2")
        check("pooling", self.pooling is None or self.pooling in POOLINGS, f"one of {', '.join(POOLINGS)}")
        check("logprobs", self.logprobs is None or is_whole(self.logprobs, 0, LOGPROBS_MAX), f"0 to {LOGPROBS_MAX}")
        check("stop", all(self.stop) and len(self.stop) <= 16, "at most 16 non-empty strings")
        check("stop_regex", all(self.stop_regex) and len(self.stop_regex) <= 16, "at most 16 non-empty strings")
        try:
            check_patterns(self.stop_regex)
        except ValueError as error:
            raise InvalidParameter("stop_regex", str(error)) from None
        start = self.prompt_logprobs_start
        check(
            "prompt_logprobs_start",
            start is None or (is_whole(start, 0) and self.logprobs is not None),
            f"between 0 and {WHOLE_MAX}, with logprobs",
        )
        check("logprob_token_ids", len(self.logprob_token_ids) <= 1024, "at most 1024 token ids")
        for token, bias in self.logit_bias.items():
            if not is_whole(token, 0) or not -100.0 <= bias <= 100.0:
                raise InvalidParameter(
                    "logit_bias", f"token {token}: must be a token id, with a bias between -100 and 100"
                )

    @property
    def penalizes(self) -> bool:
        """Whether logits depend on the tokens seen so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
