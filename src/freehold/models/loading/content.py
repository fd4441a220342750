"""Identifies a model's weights by content, not name."""

from __future__ import annotations

import hashlib
from pathlib import Path

WEIGHTS = (".safetensors", ".gguf", ".json")


def content_fingerprint(path: Path) -> bytes:
    """Return a digest [32 bytes] of a model file, or of all weights and configurations in a folder. Reads every
    byte."""
    files = sorted(one for one in path.iterdir() if one.suffix in WEIGHTS) if path.is_dir() else [path]
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as raw:
            content = hashlib.file_digest(raw, "sha256").digest()
        digest.update(content if len(files) == 1 else hashlib.sha256(file.name.encode()).digest() + content)
    return digest.digest()
