"""Names of KV by content: equal names mean equal bytes, on any machine and after any restart."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from freehold.contract.arrays import Int32

KEY_BYTES = 32


def fingerprint(fields: Mapping[str, str | int | float | bytes]) -> bytes:
    """Return a digest of named values [32 bytes]. Names and values are tagged with types and lengths, so that no two
    different records have the same bytes, and order does not matter."""
    digest = hashlib.sha256()
    for name in sorted(fields):
        value = fields[name]
        raw = value if isinstance(value, bytes) else str(value).encode()
        for part in (name.encode(), type(value).__name__.encode(), raw):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.digest()


def chain(before: bytes, tokens: Int32, page_size: int) -> list[bytes]:
    """One digest for each full page of `tokens` [n], which go on from the page with the digest `before`, or from a
    seed: it depends on that and on all tokens up to the end of its page."""
    digest, found = before, list[bytes]()
    raw = memoryview(tokens.astype("<i4").tobytes())
    for start in range(0, 4 * (len(tokens) // page_size * page_size), 4 * page_size):
        digest = hashlib.sha256(digest + raw[start : start + 4 * page_size]).digest()
        found.append(digest)
    return found


def key_in_group(digest: bytes, group: bytes) -> bytes:
    """Return the key of the page of a cache group. `group`: its fingerprint."""
    return hashlib.sha256(digest + group).digest()


class KeyChain:
    """The digests of the pages of a sequence, computed when they are asked for."""

    def __init__(self, seed: bytes, tokens: Int32, page_size: int):
        self.tokens = tokens
        self.seed = seed
        self._page_size = page_size
        self._digests: list[bytes] = []

    def __len__(self) -> int:
        """Full pages of the sequence."""
        return len(self.tokens) // self._page_size

    @property
    def made(self) -> int:
        """Columns whose digests are known."""
        return len(self._digests)

    def at(self, columns: Sequence[int]) -> list[bytes]:
        """Return the digests of `columns` [n], which ascend."""
        if columns:
            _ = self[columns[-1]]
        return [self._digests[column] for column in columns]

    def __getitem__(self, column: int) -> bytes:
        done = len(self._digests)
        if column >= done:
            before = self._digests[-1] if done else self.seed
            rest = self.tokens[done * self._page_size : (column + 1) * self._page_size]
            self._digests += chain(before, rest, self._page_size)
        return self._digests[column]
