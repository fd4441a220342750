"""Names for the NumPy array types that the bookkeeping is made of, and rows of different lengths."""

import numpy as np
import numpy.typing as npt

UInt8 = npt.NDArray[np.uint8]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]


def ragged(counts: Int64) -> tuple[Int64, Int64]:
    """Return the elements of rows of `counts` [n] elements, laid out one row after the other.

    -> the row of each element and its index within the row, int64 [sum of counts] each:
    ragged([2, 0, 1]) is ([0, 0, 2], [0, 1, 0]).
    """
    rows = np.repeat(np.arange(len(counts)), counts)
    return rows, np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]
