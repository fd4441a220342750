"""Tails: the partial last pages of parked sequences.

The tree owns whole pages. When a session's turn ends, the committed whole pages are published, and the tokens that do
not fill a page stay in a tail. A tail has no row and no pin. The next turn matches its history in the tree and resumes
from the tail where the match ends; so reuse may end inside a page. Under pressure tails go first, oldest first: each
saves less than a page of computing.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from freehold.contract.arrays import Int32
from freehold.memory.ledger import owner
from freehold.memory.ledger.errors import LeaseError
from freehold.memory.ledger.pool import PagePool
from freehold.memory.prefix.node import Namespace


@dataclass(frozen=True)
class Tail:
    """One page of each group, parked under `name`, with KV of positions start .. end. `digest` covers all tokens up to
    `end`. `fence` is the last step that may touch the pages."""

    name: str
    serial: int
    namespace: Namespace
    start: int
    end: int
    digest: bytes
    pages: list[Int32]
    fence: int

    @property
    def owner(self) -> int:
        return owner.tail(self.serial)


def digest_of(tokens: Int32) -> bytes:
    return hashlib.blake2b(tokens.tobytes(), digest_size=16).digest()


class TailTable:
    """The tails by the name they were parked under, least recently parked first."""

    def __init__(self, pools: list[PagePool]):
        self._pools = pools
        self._tails: OrderedDict[str, Tail] = OrderedDict()
        self._names: dict[int, str] = {}  # by serial
        self._serial = 0
        self.given_up_count = 0

    def __len__(self) -> int:
        return len(self._tails)

    def __contains__(self, tail: Tail) -> bool:
        return self._tails.get(tail.name) is tail

    def __iter__(self) -> Iterator[tuple[str, Tail]]:
        return iter(self._tails.items())

    def park(
        self, name: str, namespace: Namespace, start: int, tokens: Int32, pages: list[Int32], source: int, fence: int
    ) -> None:
        """Keep `pages`, owned by `source`, with the KV of `tokens[start:]`, under `name`. Replace an earlier tail of
        that name."""
        self.forget(name)
        self._serial += 1
        kept = [part.copy() for part in pages]
        tail = Tail(name, self._serial, namespace, start, len(tokens), digest_of(tokens), kept, fence)
        for pool, part in zip(self._pools, kept, strict=True):
            pool.move(part, source, tail.owner)
        self._tails[name], self._names[tail.serial] = tail, name

    def by_serial(self, serial: int) -> Tail:
        """Return a parked tail. Raise KeyError if it is not parked."""
        return self._tails[self._names[serial]]

    def find(self, name: str, namespace: Namespace, tokens: Int32, start: int) -> Tail | None:
        """Return the tail parked under `name`, if it continues the first `start` of `tokens` [n] and leaves at least
        one token to compute. Changes nothing."""
        tail = self._tails.get(name)
        if tail is None or tail.namespace != namespace or tail.start != start or tail.end >= len(tokens):
            return None
        return tail if tail.digest == digest_of(tokens[: tail.end]) else None

    def take(self, tail: Tail, target: int) -> None:
        """Hand the pages of a tail to `target`. Raise LeaseError, having changed nothing, if it is not parked."""
        if tail not in self:
            raise LeaseError(f"the tail of '{tail.name}' has been given up")
        del self._tails[tail.name], self._names[tail.serial]
        for pool, part in zip(self._pools, tail.pages, strict=True):
            pool.move(part, tail.owner, target)

    def forget(self, name: str) -> None:
        """Free a tail, if there is one."""
        tail = self._tails.pop(name, None)
        if tail is not None:
            del self._names[tail.serial]
            for pool, part in zip(self._pools, tail.pages, strict=True):
                pool.free(part, tail.owner, tail.fence)

    def give_up(self, page_count: int, keep: Tail | None = None) -> None:
        """Free at least `page_count` pages of each group, if there are as many, oldest tails first; never `keep`."""
        while page_count > 0:
            name = next((name for name, tail in self._tails.items() if tail is not keep), None)
            if name is None:
                return
            page_count -= 1
            self.given_up_count += 1
            self.forget(name)

    @property
    def page_count(self) -> int:
        """Pages of each group in tails: a tail is one page of each group."""
        return len(self._tails)
