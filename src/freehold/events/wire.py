"""Events in vLLM's format (msgpack, structs as arrays), so that its followers understand them."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from freehold.memory.events import CacheEvent, Cleared, Removed, Stored


class BlockStored(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None


class BlockRemoved(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    pass


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """`ts`: seconds since 1970."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


END = (-1).to_bytes(8, "big", signed=True)  # the number after the last batch of a replay


def numbered(number: int) -> bytes:
    """Return the frame with a batch's number."""
    return number.to_bytes(8, "big")


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(EventBatch).decode


def batch_of(events: Sequence[CacheEvent], page_size: int) -> EventBatch:
    """Return the events of one iteration as a batch."""
    return EventBatch(time.time(), [_wired(event, page_size) for event in events], 0)


def block_hash(key: bytes) -> int:
    """Return the last 64 bits of a key, as vLLM sends by default and its followers expect."""
    return int.from_bytes(key[-8:], "big")


def _hashes(keys: Sequence[bytes]) -> list[int]:
    return [block_hash(key) for key in keys]


def _wired(event: CacheEvent, page_size: int) -> BlockStored | BlockRemoved | AllBlocksCleared:
    match event:
        case Stored():
            parent = None if event.parent is None else block_hash(event.parent)
            return BlockStored(_hashes(event.keys), parent, event.tokens.tolist(), page_size, None, event.medium.value)
        case Removed():
            return BlockRemoved(_hashes(event.keys), event.medium.value)
        case Cleared():
            return AllBlocksCleared()
