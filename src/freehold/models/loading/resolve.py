"""What `--model` may be: nothing, a GGUF file, a Hugging Face directory, a hub id."""

from __future__ import annotations

from pathlib import Path

from freehold.errors import ModelUnavailable
from freehold.models.loading.bundled import bundled_model
from freehold.models.tensor import Checkpoint

_HUB_FILES = ["*.safetensors", "*.json", "tokenizer.model", "*.jinja"]


def resolve_model(model: str | None) -> Path:
    """A local path, fetched first if need be. Raises ModelUnavailable."""
    if model is None:
        return bundled_model()
    path = Path(model).expanduser()
    if path.exists():
        return path
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise ModelUnavailable(f"model: there is no file or directory '{model}', and it is not a hub id (owner/name)")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=_HUB_FILES))
    except Exception as error:
        raise ModelUnavailable(f"model: could not fetch '{model}' from the hub: {error}") from error


def open_checkpoint(path: Path) -> Checkpoint:
    """Raises ValueError for a model we can't run."""
    if path.is_dir():
        from freehold.models.loading.hf_directory import HfCheckpoint

        return HfCheckpoint(path)
    if path.suffix != ".gguf":
        raise ValueError(f"{path}: a model is a .gguf file or a Hugging Face directory")
    from freehold.models.loading.gguf_file import GgufCheckpoint

    return GgufCheckpoint(path)
