"""Putting an engine together: model, memory, scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from freehold.config import EngineConfig
from freehold.engine.cpu.device import CpuDevice
from freehold.engine.engine import StepThread
from freehold.engine.runner import Runner
from freehold.memory import Memory
from freehold.memory_plan import plan_memory
from freehold.models.loading.resolve import open_checkpoint, resolve_model
from freehold.models.spec import ModelSpec
from freehold.models.tensor import Checkpoint
from freehold.scheduler.scheduler import Scheduler
from freehold.step import KVShape
from freehold.text.loading import load_tokenizer
from freehold.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Assembly:
    config: EngineConfig
    path: Path
    spec: ModelSpec
    tokenizer: Tokenizer
    scheduler: Scheduler
    engine: StepThread


def assemble(config: EngineConfig, checkpoint: Checkpoint | None = None) -> Assembly:
    """Load the model, unless it is open already, and build everything that serves it.

    Raises ModelUnavailable or ValueError.
    """
    checkpoint = checkpoint or open_checkpoint(resolve_model(config.model))
    tokenizer = load_tokenizer(checkpoint, config.chat_template)
    shape = plan_memory(config, checkpoint).shape
    drafts = 0 if config.speculative_algorithm is None else config.speculative_num_draft_tokens
    kv_shape = KVShape(
        tuple(shape.page_counts), shape.page_size, shape.row_count, shape.token_limit, config.kv_cache_dtype, drafts
    )
    runner = Runner(config, checkpoint, kv_shape, CpuDevice(config.num_threads))
    engine = StepThread(runner)
    engine.wait_until_warm()
    scheduler = Scheduler(
        config, Memory(shape), engine, tokenizer.vocabulary, draft_cost=runner.draft_cost, timings=runner.timings
    )
    return Assembly(config, checkpoint.path, checkpoint.spec, tokenizer, scheduler, engine)
