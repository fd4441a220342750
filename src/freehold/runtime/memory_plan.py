"""How much KV memory a configuration gives to a model, and how it is cut into cache groups."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from freehold.config import EngineConfig
from freehold.engine.speculative.choice import open_draft
from freehold.memory import CacheGroup, MemoryShape
from freehold.models.spec import CacheLayout, ModelSpec
from freehold.models.tensor import Checkpoint


@dataclass(frozen=True)
class MemoryPlan:
    """What a configuration makes of a model's KV memory."""

    config: EngineConfig
    path: Path
    spec: ModelSpec
    shape: MemoryShape
    page_bytes: list[int]  # of each cache group


def plan_memory(config: EngineConfig, checkpoint: Checkpoint) -> MemoryPlan:
    """Read the descriptions of the model and its draft model, no weights. Raises ModelUnavailable, or ValueError
    naming the option that does not fit the model."""
    spec = checkpoint.spec
    limit = config.max_model_len or spec.context_length
    if limit > spec.context_length:
        raise ValueError(f"max_model_len must be at most the model's {spec.context_length}, not {limit}")
    size, kind = config.page_size, config.kv_cache_dtype
    layouts = spec.cache_layouts()
    groups = [_group(layout) for layout in layouts]
    costs = [layout.page_bytes(kind, size) for layout in layouts]
    if config.speculative_algorithm == "draft":
        draft = open_draft(config, checkpoint).spec
        costs.append(draft.one_layout()[0].page_bytes(kind, size))
    groups, pages = _cut(config, groups, costs, limit)
    shape = MemoryShape.of(config, pages, limit, groups=groups)
    return MemoryPlan(config, checkpoint.path, spec, shape, costs)


def _group(layout: CacheLayout) -> CacheGroup:
    if layout.lookback is None:
        return CacheGroup()
    if layout.is_state:
        return CacheGroup("states", layout.lookback, is_state=True)
    return CacheGroup(f"window of {layout.lookback + 1}", layout.lookback)


def _cut(config: EngineConfig, groups: list[CacheGroup], costs: list[int], limit: int) -> tuple[list[CacheGroup], int]:
    """-> `groups` with the pages of bounded ones, and the pages of each full one. `costs` are bytes of a page, a draft
    model's last.

    Bounded groups get what as many rows need as may run, but no more than half of the memory: the rest is for full
    groups. Without any of those, bounded ones get all of it.
    """
    bounded = [number for number, group in enumerate(groups) if group.is_bounded]
    full_cost = sum(costs) - sum(costs[number] for number in bounded)
    budget, rows = config.kv_cache_memory_bytes, config.max_running_requests
    columns = -(-limit // config.page_size)
    spent = 0
    for number in bounded:
        most = groups[number].pages_of_a_row(config.page_size, config.chunked_prefill_size, config.checkpoint_interval)
        row = min(most, columns)
        share = (budget // 2 if full_cost else budget) // sum(costs[one] for one in bounded)
        limit_of_all = share if config.num_pages is None else config.num_pages
        count = min(rows * row, limit_of_all) if full_cost else limit_of_all
        groups[number] = replace(groups[number], page_count=max(count, row))
        spent += max(count, row) * costs[number]
    if not full_cost:
        return groups, rows * columns
    pages = config.num_pages or (budget - spent) // full_cost
    if pages < 1:
        beside = f" beside {spent} bytes of windows" if bounded else ""
        raise ValueError(f"kv_cache_memory_bytes: {budget} holds no page of {full_cost} bytes{beside}")
    return groups, pages
