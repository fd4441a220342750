"""Resolves `--model`: nothing, a GGUF file, a Hugging Face directory, a hub id, or a file of a hub id."""

from __future__ import annotations

import re
from pathlib import Path

from freehold.contract.errors import ModelUnavailable
from freehold.models.loading.bundled import bundled_model
from freehold.models.spec import ModelSpec, difference
from freehold.models.tensor import Checkpoint

USUAL_FORMAT = "Q4_K_M"
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_HUB_FILES = ["*.safetensors", "*.json", "tokenizer.model", "*.jinja"]


def resolve_model(model: str | None) -> Path:
    """Return a local path, fetching the model if necessary. A hub id may be followed by a colon and a GGUF file, or a
    part of its name such as Q4_K_M. Raises ModelUnavailable."""
    if model is None:
        return bundled_model()
    if not model:
        raise ModelUnavailable("model: must not be empty")
    path = Path(model).expanduser()
    if path.exists():
        return path
    repository, _, choice = model.partition(":")
    if repository.count("/") != 1 or model.startswith((".", "/", "~")):
        raise ModelUnavailable(f"model: there is no file or directory '{model}', and it is not a hub id (owner/name)")
    from huggingface_hub import hf_hub_download, list_repo_files, snapshot_download

    try:
        files = list_repo_files(repository)
        if not choice and any(name.endswith(".safetensors") for name in files):
            return Path(snapshot_download(repository, allow_patterns=_HUB_FILES))
        return Path(hf_hub_download(repository, choose_file(repository, files, choice)))
    except ModelUnavailable:
        raise
    except Exception as error:
        raise ModelUnavailable(f"model: could not fetch '{model}' from the hub: {error}") from error


def choose_file(repository: str, files: list[str], choice: str) -> str:
    """Return the repository's GGUF file that `choice` names, fully or partly; without a choice the only one, or the one
    in the usual format. Raises ModelUnavailable naming the files."""
    found = [name for name in files if name.endswith(".gguf") and not _PART.search(name)]
    wanted = choice or (USUAL_FORMAT if len(found) > 1 else "")
    fitting = [name for name in found if wanted.lower() in name.lower()]
    exact = [name for name in fitting if name == wanted or Path(name).stem.lower().endswith(wanted.lower())]
    if len(chosen := exact if len(exact) == 1 else fitting) == 1:
        return chosen[0]
    if not found:
        raise ModelUnavailable(f"model: {repository} has no safetensors and no GGUF file in one piece")
    problem = f"no GGUF file with '{choice}' in its name" if choice and not fitting else "several GGUF files"
    named = ", ".join(found)
    raise ModelUnavailable(f"model: {repository} has {problem}: name one as {repository}:FILE, of {named}")


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a model. Raises ValueError for an unsupported one, ModelUnavailable for an unreadable one."""
    try:
        return _opened(path)
    except ValueError:
        raise
    except Exception as error:  # raised by the file's library
        raise ModelUnavailable(f"model: {path} can't be read: {type(error).__name__}: {error}") from error


def open_weights(source: str, spec: ModelSpec) -> Checkpoint:
    """Open weights that replace those of a model with this `spec`. Raises what `resolve_model` and `open_checkpoint`
    raise, and ValueError if the specs differ."""
    checkpoint = open_checkpoint(resolve_model(source))
    if checkpoint.spec != spec:
        raise ValueError(f"model_path: {source} is another kind of model: {difference(checkpoint.spec, spec)}")
    return checkpoint


def _opened(path: Path) -> Checkpoint:
    if path.is_dir():
        from freehold.models.loading.hf_directory import HfCheckpoint

        return HfCheckpoint(path)
    if path.suffix != ".gguf":
        raise ValueError(f"{path}: a model is a .gguf file or a Hugging Face directory")
    from freehold.models.loading.gguf_file import GgufCheckpoint

    return GgufCheckpoint(path)
