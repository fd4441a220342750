"""Freehold: a serving engine for large language models whose every KV page has one registered owner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from freehold.contract.constraint import Constraint
from freehold.contract.errors import InvalidParameter
from freehold.contract.sampling_params import SamplingParams

if TYPE_CHECKING:
    from freehold.ipc.async_engine import AsyncEngine
    from freehold.llm import LLM, Completion

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncEngine", "Completion", "Constraint", "InvalidParameter", "SamplingParams", "__version__"]

_HOMES = {"LLM": "freehold.llm", "Completion": "freehold.llm", "AsyncEngine": "freehold.ipc.async_engine"}


def __getattr__(name: str) -> Any:
    """Import engine classes on first use, so that `freehold --help` stays fast."""
    if name not in _HOMES:
        raise AttributeError(f"module 'freehold' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
