"""Owners of a page.

An owner is one int64: `id << 3 | kind`. It fits into a NumPy column, so that a move of a thousand pages is checked with
one comparison. A page has exactly one owner because it has exactly one number.
"""

from enum import IntEnum


class OwnerKind(IntEnum):
    FREE = 0
    LIMBO = 1  # freed while the step `id` could still touch it
    LEASE = 2
    NODE = 3
    TRANSFER = 4
    TAIL = 5  # the partial last page of a parked session
    ENTRY = 6  # a page on the host, found by its key
    PADDING = 7  # page 0: unused table entries point there


_KIND_BITS = 3
FREE = int(OwnerKind.FREE)
PADDING = int(OwnerKind.PADDING)
ENTRY = int(OwnerKind.ENTRY)


def limbo(fence: int) -> int:
    """Return the owner of pages that become free when step `fence` completes."""
    return fence << _KIND_BITS | OwnerKind.LIMBO


def lease(serial: int) -> int:
    return serial << _KIND_BITS | OwnerKind.LEASE


def tail(serial: int) -> int:
    return serial << _KIND_BITS | OwnerKind.TAIL


def node(serial: int) -> int:
    return serial << _KIND_BITS | OwnerKind.NODE


def transfer(number: int) -> int:
    return number << _KIND_BITS | OwnerKind.TRANSFER


def kind_of(owner: int) -> OwnerKind:
    return OwnerKind(owner & (1 << _KIND_BITS) - 1)


def id_of(owner: int) -> int:
    return owner >> _KIND_BITS


def describe(owner: int) -> str:
    """Describe an owner: 'free', 'limbo until step 7', 'lease 12', 'node 3'."""
    kind = kind_of(owner)
    if kind in (OwnerKind.FREE, OwnerKind.PADDING, OwnerKind.ENTRY):
        return kind.name.lower()
    if kind is OwnerKind.LIMBO:
        return f"limbo until step {id_of(owner)}"
    return f"{kind.name.lower()} {id_of(owner)}"
