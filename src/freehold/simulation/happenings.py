"""The events of a scenario, with their times: arrivals, faults, operator's orders. All are drawn from one seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from freehold.memory import PrefetchPolicy

REQUESTS = 32
SESSIONS = 10
TURNS = 24
PREFIX_TOKENS = 160
VOCAB_SIZE = 1000
CLIENTS = ["greedy"] * 4 + ["modest", "other"]
HINTS = [None, None, None, [0], [50, 0.02], [90, 0.2, 64], [10, 1.0]]  # of retention


class Verb(StrEnum):
    SUBMIT = "submit"
    ABORT = "abort"  # a request, once it is in a given state
    PAUSE = "pause"
    RESUME = "resume"
    HOLD = "hold"  # the engine completes nothing for some iterations
    FAIL = "fail"  # the next step fails
    EXHAUST = "exhaust"  # pages are taken until `leaving` are free, and returned after some iterations
    WEIGHTS = "weights"
    FLUSH = "flush"
    EVICT = "evict"  # pages of prefixes, as if other requests needed them
    RESTART = "restart"  # the engine's process ends, and a new one starts with the operator's settings
    CURSE = "curse"  # from now on looking a request up fails
    FORK = "fork"  # a session
    REWIND = "rewind"  # a session, to a share of its tokens
    CLOSE = "close"  # a session
    PIN = "pin"  # a prefix, as an operator
    UNPIN = "unpin"
    SAVE = "save"  # a request's tokens, to the deepest tier
    ATTACH = "attach"  # storage, with a policy
    DETACH = "detach"
    CLEAR = "clear"  # storage
    EXPLAIN = "explain"  # pages, and why a request's tokens are not cached
    RECOUNT = "recount"  # all pages, in slices


@dataclass(frozen=True)
class Happening:
    """`verb` with its arguments, at an iteration of the loop."""

    at: int
    verb: Verb
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])


def bind(happenings: list[Happening], rng: random.Random) -> None:
    """Give some requests a grammar, and let some of those grammars fail."""
    for happening in happenings:
        if happening.verb is Verb.SUBMIT and rng.random() < 0.3:
            fails = [rng.choice([0, 1, 7])] if rng.random() < 0.1 else []
            happening.arguments["form"] = [rng.randrange(1, 1 << 30), rng.choice([1, 6, 25, 1000]), *fails]


def watch(happenings: list[Happening], rng: random.Random) -> None:
    """Give some requests a stop expression, and ask for embeddings of some prompts."""
    for happening in happenings:
        if happening.verb is Verb.SUBMIT:
            draw = rng.random()
            if draw < 0.1:
                happening.arguments["stop_regex"] = [rng.choice(["7[0-4]*>", "(1|2)5><[3-9]", "<.9>"])]
            elif draw < 0.2:
                happening.arguments["pooling"] = rng.choice(["last", "mean"])
            elif happening.arguments["session"] is not None:
                continue
            elif draw < 0.25 and happening.arguments["max_tokens"] > 5:
                happening.arguments["min_tokens"] = 5
            elif draw < 0.4 and 6 <= happening.arguments.get("form", [0, 0])[1] <= 25:
                happening.arguments["max_tokens"] = None  # its grammar ends it


def _logprobs(rng: random.Random) -> dict[str, int]:
    """Choose the requested log-probabilities: none, the output's, or some of the prompt's as well."""
    return rng.choice([{}, {}, {"logprobs": 0}, {"logprobs": 0, "prompt_logprobs_start": rng.choice([0, 3, 40])}])


def requests(rng: random.Random) -> Iterator[Happening]:
    """Yield bursts of requests that share prefixes; some are aborted in a chosen state."""
    families = [[rng.randrange(VOCAB_SIZE) for _ in range(PREFIX_TOKENS)] for _ in range(4)]
    now = 0
    for number in range(REQUESTS):
        now += rng.choice([0, 0, 0, 1, 3, 12])
        prefix = rng.choice(families)[: rng.choice([0, 16, 40, 64, 65, 128, PREFIX_TOKENS])]
        tail = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([1, 2, 5, 17, 60, 180]))]
        name = f"r{number}"
        yield Happening(
            now,
            Verb.SUBMIT,
            {
                "id": name,
                "prompt": prefix + tail,
                "max_tokens": rng.choice([1, 2, 8, 20, 60]),
                "min_tokens": rng.choice([0, 0, 1]),
                "ignore_eos": rng.random() < 0.6,
                "stop": rng.choice([[], [], ["7><"], ["<12", "9>"]]),
                "stop_token_ids": rng.choice([[], [], [5, 55, 555]]),
                "namespace": rng.choice(["", "", "", "tenant"]),
                "adapter": "first" if number % 5 == 4 else "second" if number % 9 == 8 else "",
                "client": rng.choice(CLIENTS),
                "priority": rng.randrange(3),
                "timeout": rng.choice([None] * 8 + [0.05, 1.0]),
                "session": None,
                "retention": rng.choice(HINTS),
                **_logprobs(rng),
            },
        )
        if rng.random() < 0.08:
            name_of_pin, ttl = f"p{rng.randrange(3)}", rng.choice([None, 0.1])
            yield Happening(now + 9, Verb.PIN, {"name": name_of_pin, "tokens": prefix + tail, "ttl": ttl})
            yield Happening(now + rng.choice([10, 60]), Verb.UNPIN, {"name": f"p{rng.randrange(3)}"})
        if rng.random() < 0.25:
            state = rng.choice(["waiting", "prefilling", "running", "retracted", "any"])
            yield Happening(now + rng.choice([0, 1, 4, 15]), Verb.ABORT, {"id": name, "state": state})


def turns(rng: random.Random) -> Iterator[Happening]:
    """Yield turns of sessions that together want many times the memory of a tight pool."""
    now = 0
    system = [rng.randrange(VOCAB_SIZE) for _ in range(40)]
    # Few, so that forks and retries compute the same tokens, and a tail lies beside another turn's published pages.
    asked = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 3, 17, 70)]
    for number in range(TURNS):
        now += rng.choice([0, 0, 2, 9])
        session, name = f"s{rng.randrange(SESSIONS)}", f"t{number}"
        turn = {
            "prompt": rng.choice(asked),
            "first": system,
            "max_tokens": rng.choice([1, 5, 30]),
            "min_tokens": 0,
            "ignore_eos": rng.random() < 0.6,
            "stop": rng.choice([[], [], ["7><"]]),
            "stop_token_ids": [],
            "namespace": "",
            "client": rng.choice(CLIENTS),
            "priority": rng.randrange(3),
            "timeout": rng.choice([None] * 8 + [0.05]),
            "retention": rng.choice(HINTS),
            **_logprobs(rng),
        }
        yield Happening(now, Verb.SUBMIT, {"id": name, "session": session, **turn})
        if rng.random() < 0.25:
            state = rng.choice(["waiting", "prefilling", "running", "any"])
            yield Happening(now + rng.choice([0, 1, 4]), Verb.ABORT, {"id": name, "state": state})
        if rng.random() < 0.1:
            yield Happening(now, Verb.REWIND, {"session": session, "share": rng.random()})
        if rng.random() < 0.1:
            yield Happening(now, Verb.FORK, {"session": session, "to": f"s{rng.randrange(SESSIONS)}"})
        if rng.random() < 0.05:
            yield Happening(now, Verb.CLOSE, {"session": session})
        if rng.random() < 0.15:
            yield from _race(rng, now, name, {**turn, "prompt": rng.choice(asked[1:])})


def _race(rng: random.Random, now: int, name: str, turn: dict[str, Any]) -> Iterator[Happening]:
    """Let two sessions compute the same tokens, one ahead of the other. What the first published, perhaps now only on
    the host, lies beside the tail of the second. Sometimes there is no room to load it."""
    is_short = rng.random() < 0.3
    for number in range(6):
        now += rng.choice([1, 5, 25, 60])
        if number >= 3:
            yield Happening(now, Verb.EVICT, {"pages": rng.choice([1, 4, 1000])})
        if is_short and number == 4:
            yield Happening(now, Verb.EXHAUST, {"leaving": rng.choice([0, 1, 2]), "iterations": 30})
        session = f"{name}-{'first' if number < 3 else 'second'}"
        yield Happening(now, Verb.SUBMIT, {"id": f"{name}.{number}", "session": session, **turn})


def orders(rng: random.Random) -> Iterator[Happening]:
    """Yield what an operator asks while requests run."""
    for _ in range(rng.choice([0, 2, 4])):
        yield Happening(rng.randrange(5, 200), Verb.EXPLAIN, {"id": f"r{rng.randrange(REQUESTS)}"})
    for _ in range(rng.choice([0, 1, 4])):
        yield Happening(rng.randrange(5, 250), Verb.SAVE, {"id": f"{rng.choice('rt')}{rng.randrange(TURNS)}"})
    for _ in range(rng.choice([0, 0, 1])):
        yield Happening(rng.randrange(5, 200), Verb.RECOUNT)
    if rng.random() < 0.1:
        yield Happening(rng.randrange(5, 200), Verb.WEIGHTS, {"source": rng.choice(["alien", "torn"])})
    for _ in range(rng.choice([0, 0, 1, 2])):
        at, policy = rng.randrange(5, 200), rng.choice([*PrefetchPolicy])
        yield Happening(at, rng.choice([Verb.CLEAR, Verb.DETACH]))
        yield Happening(at + rng.choice([1, 5, 30]), Verb.ATTACH, {"policy": policy})


def troubles(rng: random.Random) -> Iterator[Happening]:
    for _ in range(rng.choice([0, 1, 3])):
        at = rng.randrange(5, 150)
        yield Happening(at, Verb.HOLD, {"iterations": rng.choice([1, 3, 20])})
    for _ in range(rng.choice([0, 0, 1, 2])):
        at = rng.randrange(5, 150)
        yield Happening(at, Verb.PAUSE, {"mode": rng.choice(["abort", "retract", "retract", "in_place", "in_place"])})
        if rng.random() < 0.5:
            yield Happening(at + 1, Verb.WEIGHTS, {"source": rng.choice("012")})
        yield Happening(at + rng.choice([1, 5, 30]), Verb.RESUME)
    if rng.random() < 0.3:
        yield Happening(rng.randrange(5, 150), Verb.FAIL)
    if rng.random() < 0.4:
        at = rng.randrange(5, 100)
        leaving, iterations = rng.choice([0, 1, 3]), rng.choice([1, 10, 40])
        yield Happening(at, Verb.EXHAUST, {"leaving": leaving, "iterations": iterations})
    if rng.random() < 0.3:
        yield Happening(rng.randrange(5, 150), Verb.FLUSH)
    if rng.random() < 0.3:
        yield Happening(rng.randrange(5, 150), Verb.WEIGHTS, {"source": rng.choice("012")})
    for _ in range(rng.choice([0, 0, 0, 1, 2])):
        yield Happening(rng.randrange(20, 250), Verb.RESTART)
    for _ in range(rng.choice([0, 0, 1])):
        yield Happening(rng.randrange(0, 60), Verb.CURSE, {"id": f"r{rng.randrange(REQUESTS)}"})
