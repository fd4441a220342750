"""Compiled kernels that were kept by another version of this program."""

from __future__ import annotations

from typing import Any

from numba.core import caching

_file: Any = caching.IndexDataCacheFile


def compile_what_is_lost() -> None:
    """Compile kernels again whose index names a class that has moved since. Numba reads the classes of arguments before
    it compares the source, and would raise."""
    load: Any = _file._load_index
    if getattr(load, "__module__", None) == __name__:
        return

    def load_index(self: Any) -> dict[Any, str]:
        try:
            return load(self)
        except (ImportError, AttributeError):
            return {}

    _file._load_index = load_index
