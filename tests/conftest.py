"""Real parts, opened once: the bundled model, and the same weights in transformers."""

from __future__ import annotations

import functools
import os

import httpx
import pytest
from hypothesis import Phase, settings

pytest_plugins = ["sampling"]
settings.register_profile("freehold", deadline=None)  # no test is timed
settings.register_profile("unshrunk", deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "freehold"))
# httpx makes a context for TLS for each client, which takes 20 ms: one for equal arguments is enough.
httpx._transports.default.create_ssl_context = functools.cache(  # pyright: ignore[reportPrivateImportUsage]
    httpx.create_ssl_context
)
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def checkpoint():
    """The bundled model, open."""
    from freehold.models.loading.resolve import open_checkpoint, resolve_model

    return open_checkpoint(resolve_model(None))


@pytest.fixture(scope="session")
def license_text() -> str:
    """English prose, 11 kB."""
    from pathlib import Path

    return (Path(__file__).parent.parent / "LICENSE").read_text()


@pytest.fixture(scope="session")
def transformers_model(checkpoint):
    """transformers' float32 model from the same file, dequantized by transformers itself."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(os.cpu_count() or 1)
    folder, name = str(checkpoint.path.parent), checkpoint.path.name
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
