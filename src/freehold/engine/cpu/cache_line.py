"""Arrays aligned to cache lines. Registers of 64 bytes are read line by line; unaligned, each is read from two."""

from numba import njit

LINE = 64  # bytes


@njit(inline="always")
def aligned(room):
    """Return `room`, an array with LINE spare bytes, from its first line on."""
    first = -room.ctypes.data % LINE
    return room[first // room.itemsize : len(room) - (LINE - first) // room.itemsize]
