"""Putting an engine together: model, memory, scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from freehold.config import EngineConfig
from freehold.contract.step import KVShape
from freehold.engine.adapters import Adapters
from freehold.engine.cpu.device import CpuDevice
from freehold.engine.engine import StepThread
from freehold.engine.grammar.compiler import Grammars
from freehold.engine.page_mover import PageMover
from freehold.engine.runner import Runner
from freehold.memory import Memory
from freehold.memory.events import CacheEvent, EventLog
from freehold.models.loading.content import content_fingerprint
from freehold.models.loading.dry_run import check_tensors
from freehold.models.loading.resolve import open_checkpoint, open_weights, resolve_model
from freehold.models.quantize import Quantizer
from freehold.models.spec import ModelSpec
from freehold.models.tensor import Checkpoint, TensorFormat
from freehold.runtime.memory_plan import MemoryPlan, plan_memory
from freehold.runtime.tier_plan import check_tiers, configured_storage, plan_tiers
from freehold.scheduler.scheduler import Scheduler
from freehold.text.loading import load_tokenizer
from freehold.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from freehold.events.publisher import EventPublisher


@dataclass(frozen=True)
class Assembly:
    config: EngineConfig
    path: Path
    spec: ModelSpec
    tokenizer: Tokenizer
    scheduler: Scheduler
    engine: StepThread
    mover: PageMover | None
    publisher: EventPublisher | None
    grammars: Grammars | None
    adapters: Adapters | None
    cpu_isa: str
    quantized: str  # size and error of converted weights; empty without `quantize`

    def publish(self, events: Sequence[CacheEvent]) -> None:
        """Tell followers, if there may be any."""
        if self.publisher is not None:
            self.publisher.publish(events)

    def shutdown(self) -> None:
        """End all threads."""
        self.engine.shutdown()
        if self.mover is not None:
            self.mover.shutdown()
        if self.publisher is not None:
            self.publisher.close()


def check(config: EngineConfig) -> MemoryPlan:
    """Plan the memory of a configuration that can be assembled, as far as that can be told without loading weights or
    opening storage. Raises ModelUnavailable or ValueError."""
    checkpoint = open_checkpoint(resolve_model(config.model))
    load_tokenizer(checkpoint, config.chat_template)
    plan = plan_memory(config, checkpoint)
    check_tiers(config, plan)
    if config.kv_events_config is not None:
        from freehold.events.config import EventsConfig

        EventsConfig.parse(config.kv_events_config)
    if checkpoint.path.is_file():  # tensors of a GGUF file are mapped; a directory's would be read
        check_tensors(checkpoint)
    return plan


def assemble(config: EngineConfig, checkpoint: Checkpoint | None = None, weights: str | None = None) -> Assembly:
    """Load the model, unless it is open already, and build everything that serves it. `weights`: where those come from
    that compute in place of the model's own.

    Raises ModelUnavailable, ValueError, or StoreUnavailable.
    """
    checkpoint = checkpoint or open_checkpoint(resolve_model(config.model))
    loaded = checkpoint if weights is None else open_weights(weights, checkpoint.spec)
    tokenizer = load_tokenizer(checkpoint, config.chat_template)
    plan = plan_memory(config, checkpoint)
    shape, tiers = plan.shape, plan_tiers(config, checkpoint, plan)
    guessed = 0 if config.speculative_algorithm is None else config.speculative_num_draft_tokens
    drafts = max(guessed, config.forced_limit)
    kv_shape = KVShape(
        tuple(shape.page_counts), shape.page_size, shape.row_count, shape.token_limit, config.kv_cache_dtype, drafts
    )
    quantizer = None if config.quantize is None else Quantizer(TensorFormat(config.quantize.upper()))
    store = None if tiers is None else configured_storage(config)  # a wrong setting is told before the model is loaded
    device = CpuDevice(config.num_threads, config.cpu_isa, quantizer)
    runner = Runner(config, checkpoint, kv_shape, device, tokenizer.eos_tokens, loaded)
    engine = StepThread(runner)
    engine.wait_until_warm()
    # True of whatever weights of this shape compute, with whatever adapter.
    kind = f"{checkpoint.spec.architecture}, {checkpoint.spec.layer_count} layers, {config.kv_cache_dtype}"
    about = [f"{kind}, {group.name}, {shape.page_size} tokens" for group in shape.groups]
    mover = None if tiers is None else PageMover(runner.page_bytes(), tiers.page_counts, store, about)
    publisher = _publisher(config)
    memory = Memory(shape, tiers, mover, None if publisher is None else EventLog(shape.page_size))
    if tiers is not None:
        memory.replace_weights(content_fingerprint(loaded.path))
    scheduler = Scheduler(
        config, memory, engine, tokenizer.vocabulary, draft_cost=runner.draft_cost, timings=runner.timings
    )
    grammars = _grammars(config, checkpoint, tokenizer)
    if runner.adapters is not None:
        for name, path in config.adapter_paths.items():
            runner.adapters.load(name, path)
    return Assembly(
        config, checkpoint.path, checkpoint.spec, tokenizer, scheduler, engine, mover, publisher, grammars,
        runner.adapters, device.isa, "" if quantizer is None else quantizer.report,
    )  # fmt: skip


def _grammars(config: EngineConfig, checkpoint: Checkpoint, tokenizer: Tokenizer) -> Grammars | None:
    if config.grammar_backend == "none":
        return None
    seconds, size = config.grammar_compile_timeout, config.grammar_cache_bytes
    return Grammars(tokenizer, checkpoint.spec.vocab_size, seconds, size)


def _publisher(config: EngineConfig) -> EventPublisher | None:
    """Import the publisher only on demand: an engine without followers needs no ZeroMQ. Raises ValueError."""
    if config.kv_events_config is None:
        return None
    from freehold.events.config import EventsConfig
    from freehold.events.publisher import EventPublisher

    wanted = EventsConfig.parse(config.kv_events_config)
    return EventPublisher(wanted, config.page_size) if wanted.is_on else None
