"""Arrays that begin where a line of the cache begins. Registers of 64 bytes are read line by line; otherwise each of
them is read from two."""

from numba import njit

LINE = 64  # bytes


@njit(inline="always")
def aligned(room):
    """`room`, an array of LINE bytes more than are needed, from its first line on."""
    first = -room.ctypes.data % LINE
    return room[first // room.itemsize : len(room) - (LINE - first) // room.itemsize]
