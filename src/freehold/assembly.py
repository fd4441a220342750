"""Putting an engine together: model, memory, scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from freehold.config import EngineConfig
from freehold.engine.cpu.device import CpuDevice
from freehold.engine.engine import StepThread
from freehold.engine.runner import Runner
from freehold.engine.speculative.choice import open_draft
from freehold.memory import Memory, MemoryShape
from freehold.models.loading.resolve import open_checkpoint, resolve_model
from freehold.models.spec import Checkpoint, DecoderSpec
from freehold.scheduler.scheduler import Scheduler
from freehold.step import KVShape
from freehold.text.loading import load_tokenizer
from freehold.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Assembly:
    config: EngineConfig
    path: Path
    spec: DecoderSpec
    tokenizer: Tokenizer
    scheduler: Scheduler
    engine: StepThread


@dataclass(frozen=True)
class MemoryPlan:
    """What a configuration makes of a model's KV memory."""

    config: EngineConfig
    path: Path
    spec: DecoderSpec
    shape: MemoryShape
    page_bytes: int  # of all cache groups


def plan_memory(config: EngineConfig, checkpoint: Checkpoint) -> MemoryPlan:
    """Reads the descriptions of the model and its draft model, no weights. A draft model has KV of its own in the same
    pages. Raises ModelUnavailable, or ValueError naming the option that does not fit the model."""
    spec = checkpoint.spec
    limit = config.max_model_len or spec.context_length
    if limit > spec.context_length:
        raise ValueError(f"max_model_len must be at most the model's {spec.context_length}, not {limit}")
    models = [spec, open_draft(config, checkpoint).spec] if config.speculative_algorithm == "draft" else [spec]
    page_bytes = config.page_size * sum(one.kv_bytes_per_token(config.kv_cache_dtype) for one in models)
    pages = config.num_pages or config.kv_cache_memory_bytes // page_bytes
    if pages < 1:
        raise ValueError(f"kv_cache_memory_bytes: {config.kv_cache_memory_bytes} holds no page of {page_bytes} bytes")
    return MemoryPlan(config, checkpoint.path, spec, MemoryShape.of(config, pages, limit), page_bytes)


def assemble(config: EngineConfig, checkpoint: Checkpoint | None = None) -> Assembly:
    """Load the model, unless it is open already, and build everything that serves it.

    Raises ModelUnavailable or ValueError.
    """
    checkpoint = checkpoint or open_checkpoint(resolve_model(config.model))
    tokenizer = load_tokenizer(checkpoint, config.chat_template)
    shape = plan_memory(config, checkpoint).shape
    kv_shape = KVShape(shape.page_count, shape.page_size, shape.row_count, shape.token_limit, config.kv_cache_dtype)
    runner = Runner(config, checkpoint, kv_shape, CpuDevice(config.num_threads))
    engine = StepThread(runner)
    engine.wait_until_warm()
    scheduler = Scheduler(
        config, Memory(shape), engine, tokenizer.vocabulary, draft_cost=runner.draft_cost, timings=runner.timings
    )
    return Assembly(config, checkpoint.path, checkpoint.spec, tokenizer, scheduler, engine)
