"""Messages between the two processes: msgpack over a ZeroMQ pair."""

from __future__ import annotations

from typing import Any

import msgspec

from freehold.contract.errors import FreeholdError, as_freehold_error, rebuilt
from freehold.contract.sampling_params import SamplingParams
from freehold.contract.step import TokenLogprobs
from freehold.memory import Retention
from freehold.memory.tiers.counts import TierCounts

# -- from HTTP to the engine ---------------------------------------------------------------------------


class Options(msgspec.Struct, frozen=True):
    """A request's options besides tokens, named as in `scheduler.Request`."""

    priority: int = 0
    namespace: str = ""
    timeout: float | None = None
    session: str | None = None
    retention: Retention | None = None
    client: str = ""
    adapter: str = ""  # name of a loaded adapter; empty for the base model

    def of(self, client: str) -> Options:
        """Return these options for a client."""
        return msgspec.structs.replace(self, client=client)


class Submit(msgspec.Struct, tag=True):
    """A request. `prompt` is int32 bytes."""

    id: str
    prompt: bytes
    params: SamplingParams
    seed: int
    options: Options


class Abort(msgspec.Struct, tag=True):
    id: str


class Forget(msgspec.Struct, tag=True):
    """Drop a closed session."""

    session: str


class Call(msgspec.Struct, tag=True):
    """A call of an engine procedure (`procedures.py`), answered with one Reply."""

    number: int
    procedure: str
    argument: Any = None


class Cancel(msgspec.Struct, tag=True):
    """End the job of a call whose caller has left, without a reply."""

    number: int


class Stop(msgspec.Struct, tag=True):
    """End the engine process."""


Command = Submit | Abort | Forget | Call | Cancel | Stop

# -- from the engine to HTTP ---------------------------------------------------------------------------


class Ready(msgspec.Struct, tag=True):
    """The engine is ready to serve."""

    model_path: str
    architecture: str
    vocab_size: int
    max_model_len: int
    capacity_tokens: int
    hidden_size: int = 0
    cpu_isa: str = ""
    quantized: str = ""


class Failed(msgspec.Struct, tag=True):
    """The engine could not start."""

    message: str


class Accepted(msgspec.Struct, tag=True):
    id: str


class Failure(msgspec.Struct):
    """A FreeholdError in transit to the other process."""

    kind: str
    message: str
    field: str | None
    status: int

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Convert an error. Text that is not valid UTF-8, such as a file name, is escaped."""
        known = as_freehold_error(error)
        message = known.message.encode(errors="backslashreplace").decode()
        return cls(type(known).__name__, message, known.field, known.status)

    def error(self) -> FreeholdError:
        return rebuilt(self.kind, self.message, self.field, self.status)


class Rejected(msgspec.Struct, tag=True):
    id: str
    failure: Failure


class Ended(msgspec.Struct):
    """An output that has ended. Times are in seconds."""

    id: str
    kind: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    retractions: int
    queued: float
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    retained_tokens: int = 0
    cached_by_tier: dict[str, int] = {}
    matched: int | str | None = None
    failure: Failure | None = None

    @property
    def message(self) -> str:
        return "" if self.failure is None else self.failure.message

    @property
    def is_complete(self) -> bool:
        """Return whether the output ended normally."""
        return self.kind in ("stop", "length")


class Stats(msgspec.Struct):
    """A snapshot for metrics; counters count from the start."""

    running: int = 0
    waiting: int = 0
    steps: int = 0
    sampled_tokens: int = 0
    retractions: int = 0
    evicted_pages: int = 0
    pages: dict[str, dict[str, int]] = {}  # of each cache group, by owner
    tiers: TierCounts | None = None  # None without a tier below the device
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    grammars_compiling: int = 0  # requests waiting for their grammar
    grammar_failures: dict[str, int] = {}  # while compiling, and while running
    storage_trouble: str | None = None  # why storage is not used, if so
    unwell: str | None = None  # a failed audit, or a stuck engine


class Progress(msgspec.Struct, tag=True):
    """One iteration: `tokens[i]` belongs to `ids[i]`. `cached` counts and prompt log-probabilities, if requested, come
    with a request's first output."""

    ids: list[str]
    tokens: list[int]
    logprobs: dict[int, TokenLogprobs]
    ended: list[Ended]
    cached: dict[str, int] = {}
    prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
    embeddings: dict[str, bytes] = {}  # float32, with the first output
    stats: Stats | None = None


class Reply(msgspec.Struct, tag=True):
    number: int
    value: Any = None
    failure: Failure | None = None


Report = Ready | Failed | Accepted | Rejected | Progress | Reply

encode = msgspec.msgpack.Encoder().encode


def encode_reply(reply: Reply) -> bytes:
    """Encode a reply. Replace a value that msgpack can't encode by an error."""
    try:
        return encode(reply)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        return encode(Reply(reply.number, failure=Failure.of(error)))


decode_command = msgspec.msgpack.Decoder(Command).decode
decode_report = msgspec.msgpack.Decoder(Report).decode
