"""The cache of compiled kernels, and its invalidation.

Numba checks only the file that defines a kernel. Ours are composed from several files: without this, a kernel would
stay stale after a change of another file.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from pathlib import Path
from typing import Any

from numba.core import caching

_FOLDER = Path(__file__).parent
# Excludes imports for type checkers, which are indented.
_IMPORTS = re.compile(rf"^from {re.escape(__package__ or '')}(?:\.(\w+))? import (.*)$", re.MULTILINE)
_caching: Any = caching


def parts_of(file: Path) -> set[Path]:
    """Return this folder's files that a module depends on: itself and its imports, transitively."""
    found, new = {file}, [file]
    while new:
        for module, names in _IMPORTS.findall(new.pop().read_text()):
            for name in [module] if module else re.findall(r"\w+", names):
                part = file.with_name(f"{name}.py")
                if part.exists() and part not in found:
                    found.add(part)
                    new.append(part)
    return found


@cache
def content_of(file: Path) -> str:
    """Return a hash of all files that a module depends on."""
    parts = sorted(parts_of(file))
    return hashlib.sha256(b"\0".join(part.name.encode() + part.read_bytes() for part in parts)).hexdigest()


def _by_content(kind: Any) -> Any:
    """Return a Numba cache locator for this folder's kernels that hashes all their files."""

    class ByContent(kind):
        @classmethod
        def from_function(cls, py_func: Any, py_file: str) -> Any:
            return super().from_function(py_func, py_file) if Path(py_file).parent == _FOLDER else None

        def get_source_stamp(self) -> str:
            return content_of(Path(self._py_file))

    return ByContent


class Nowhere:
    """The last locator, in place of an error of Numba's that does not say what to do."""

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> Any:
        where = f"neither {Path(py_file).parent} nor the user's cache folder can be written to"
        raise PermissionError(f"compiled kernels can't be kept: {where}. Set NUMBA_CACHE_DIR to a folder that can")


def keep_kernels_by_content() -> None:
    """Install the locators, before the first kernel is declared. Numba's first three locators search the user's choice,
    beside the source, and the user's cache folder."""
    kinds = _caching.CacheImpl._locator_classes
    kinds[:0] = [_by_content(kind) for kind in kinds[:3]]
    kinds.append(Nowhere)


def is_kept(kernel: Any) -> bool:
    """Return whether the cache has a current compiled function for any arguments."""
    return bool(kernel._cache._cache_file._load_index())
