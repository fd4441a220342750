"""What identifies a model's weights: their content, not their name."""

from __future__ import annotations

import hashlib
from pathlib import Path

WEIGHTS = (".safetensors", ".gguf", ".json")


def content_fingerprint(path: Path) -> bytes:
    """A digest of a model file, or of all weights and configurations in a folder [32 bytes]. It reads every byte."""
    files = sorted(one for one in path.iterdir() if one.suffix in WEIGHTS) if path.is_dir() else [path]
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as raw:
            content = hashlib.file_digest(raw, "sha256").digest()
        digest.update(content if len(files) == 1 else hashlib.sha256(file.name.encode()).digest() + content)
    return digest.digest()
