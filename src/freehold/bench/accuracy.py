"""The accuracy of each compute mode, against float32 products of the same weights."""

from __future__ import annotations

from dataclasses import dataclass
from pydoc_data.topics import topics

import numpy as np
from rich.console import Console
from rich.table import Table

from freehold.config import KV_CACHE_DTYPES, LINEAR_COMPUTE
from freehold.contract.arrays import Float32, Int32
from freehold.contract.step import KVShape
from freehold.engine.cpu.device import CpuDevice
from freehold.engine.placed_model import PlacedModel
from freehold.models.loading.resolve import open_checkpoint, resolve_model
from freehold.models.tensor import Checkpoint
from freehold.text.loading import load_tokenizer

LENGTH, TEXTS = 512, 6
KL_MAX = 0.01  # nats per token
PAGE = 16
FORMATS = [(compute, kv) for compute in LINEAR_COMPUTE for kv in KV_CACHE_DTYPES]  # the first: float32 throughout


@dataclass(frozen=True)
class Accuracy:
    """Means over tokens: KL divergence of the distributions in nats, share of equal best tokens, perplexity."""

    kl: float
    agreement: float
    perplexity: float


def run_accuracy(model: str | None) -> int:
    """Print a table. Return exit code 0 if every KL divergence is within KL_MAX."""
    CpuDevice().prepare_thread()
    console = Console()
    checkpoint = open_checkpoint(resolve_model(model))
    prose = " ".join(topics[name] for name in sorted(topics))
    tokens = load_tokenizer(checkpoint).encode(prose[: LENGTH * TEXTS * 8])[: LENGTH * TEXTS].reshape(TEXTS, LENGTH)
    with console.status("Computing logits ..."):
        reference = [_log_probabilities(checkpoint, FORMATS[0], text) for text in tokens]
        found = {formats: _compare(checkpoint, formats, tokens, reference) for formats in FORMATS}
    title = f"{LENGTH * TEXTS} tokens of English"
    table = Table("products", "KV", "KL, nats", "same best token", "perplexity", title=title)
    for formats, one in found.items():
        table.add_row(*formats, f"{one.kl:.5f}", f"{one.agreement:.2%}", f"{one.perplexity:.3f}")
    console.print(table)
    return 0 if all(one.kl < KL_MAX for one in found.values()) else 1


def _compare(checkpoint: Checkpoint, formats: tuple[str, str], texts: Int32, reference: list[Float32]) -> Accuracy:
    kl: list[float] = []
    same: list[float] = []
    surprise: list[float] = []
    for text, right in zip(texts, reference, strict=True):
        ours = _log_probabilities(checkpoint, formats, text)
        kl.append(float((np.exp(right) * (right - ours)).sum(axis=1).mean()))
        same.append(float((right.argmax(axis=1) == ours.argmax(axis=1)).mean()))
        surprise.append(-float(ours[np.arange(LENGTH - 1), text[1:]].mean()))
    return Accuracy(float(np.mean(kl)), float(np.mean(same)), float(np.exp(np.mean(surprise))))


def _log_probabilities(checkpoint: Checkpoint, formats: tuple[str, str], tokens: Int32) -> Float32:
    """Return float32 [n, vocab] after each of `tokens` int32 [n], computed as one prompt."""
    (compute, kv), pages = formats, -(-len(tokens) // PAGE)
    layouts = checkpoint.spec.cache_layouts()
    shape = KVShape((pages,) * len(layouts), PAGE, 1, len(tokens), kv)
    model = PlacedModel(checkpoint, CpuDevice(), shape, layouts, compute)
    columns = np.arange(pages, dtype=np.int32)
    model.update_pages([(np.zeros(pages, np.int32), columns, columns + 1)] * len(layouts))
    zero = np.zeros(1, np.int64)
    logits = model.logits(model.forward(tokens, model.batch(zero, zero, zero + len(tokens))))
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
