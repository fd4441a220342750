"""What an answer consists of, in the order in which it was said."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The answer's call number `index` of a tool begins. `id` is what its result will be sent under."""

    index: int
    name: str
    id: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A part of the arguments of call `index`: all parts together are one JSON object."""

    index: int
    text: str


Event = Content | Reasoning | CallStart | Arguments
