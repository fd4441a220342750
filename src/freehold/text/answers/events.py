"""The events of an answer, in order."""

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
    """Tool call number `index` of the answer begins. Its result will refer to `id`."""

    index: int
    name: str
    id: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A part of the arguments of call `index`. All parts together are one JSON object."""

    index: int
    text: str


Event = Content | Reasoning | CallStart | Arguments
