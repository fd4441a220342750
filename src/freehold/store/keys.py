"""Names of KV by content: equal names mean equal bytes, on any machine and after any restart."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from freehold.arrays import Int32

KEY_BYTES = 32


def fingerprint(fields: Mapping[str, str | int | float | bytes]) -> bytes:
    """A digest of named values [32 bytes]. Names and values are tagged with their types and lengths, so that no two
    different records have the same bytes, and order does not matter."""
    digest = hashlib.sha256()
    for name in sorted(fields):
        value = fields[name]
        raw = value if isinstance(value, bytes) else str(value).encode()
        for part in (name.encode(), type(value).__name__.encode(), raw):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.digest()


class PrefixKeys:
    """Keys of the pages of a prefix. Page i's key depends on `seed` and on all tokens up to its end; that of a cache
    group also on the group's own fingerprint."""

    def __init__(self, seed: bytes, page_size: int):
        self._seed = seed
        self._page_size = page_size

    def chain(self, tokens: Int32, before: bytes | None = None) -> list[bytes]:
        """One digest for each full page of `tokens` [n], which go on from the page with the digest `before`."""
        digest, size = before or self._seed, self._page_size
        raw, found = memoryview(tokens.astype("<i4").tobytes()), []
        for start in range(0, len(tokens) // size * size, size):
            digest = hashlib.sha256(digest + raw[4 * start : 4 * (start + size)]).digest()
            found.append(digest)
        return found

    def of_group(self, chain: Sequence[bytes], group: bytes) -> list[bytes]:
        """The keys of a group's pages. `group`: its fingerprint."""
        return [hashlib.sha256(digest + group).digest() for digest in chain]
