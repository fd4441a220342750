"""Prometheus metrics: vLLM's names, for its dashboards, and our own for pages by owner."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from freehold.ipc.async_engine import AsyncEngine
from freehold.ipc.protocol import Stats
from freehold.ipc.streams import Delta

MODEL = "model_name"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


def _used_share(counts: dict[str, int]) -> float:
    """Return the share of a group's pages that requests use."""
    return (counts["lease"] + counts["pinned"]) / counts["capacity"] if counts["capacity"] else 0.0


class _EngineCollector(Collector):
    """The engine process's last report."""

    def __init__(self, engine: AsyncEngine, model_name: str):
        self._engine = engine
        self._model = model_name

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats
        drafted, accepted = stats.drafted_tokens, stats.accepted_tokens
        yield self._gauge("vllm:num_requests_running", "Requests that hold a row", stats.running)
        yield self._gauge("vllm:num_requests_waiting", "Requests in the queue", stats.waiting)
        share = max((_used_share(counts) for counts in stats.pages.values()), default=0.0)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of pages that requests use, of the fullest group", share)
        yield self._counter("vllm:num_preemptions", "Requests retracted", stats.retractions)
        yield from self._pages(stats.pages)
        yield from self._tiers(stats)
        yield self._counter("freehold_evicted_pages", "Pages evicted from the prefix tree", stats.evicted_pages)
        yield self._counter("freehold_steps", "Steps submitted to the engine", stats.steps)
        yield self._counter("freehold_sampled_tokens", "Tokens sampled", stats.sampled_tokens)
        yield self._counter("freehold_engine_restarts", "Engine processes started again", self._engine.restarts)
        yield self._counter("vllm:spec_decode_num_draft_tokens", "Draft tokens verified", drafted)
        yield self._counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted", accepted)
        rate = accepted / drafted if drafted else 0.0
        yield self._gauge("freehold_draft_acceptance_rate", "Share of draft tokens accepted", rate)
        compiling = "Requests waiting for their grammar to compile"
        yield self._gauge("freehold_grammars_compiling", compiling, stats.grammars_compiling)
        text = "Requests that ended because of their grammar, by when"
        yield self._labelled(CounterMetricFamily, "freehold_grammar_failures", text, "reason", stats.grammar_failures)
        unwell = 0.0 if stats.unwell is None else 1.0
        yield self._gauge("freehold_unwell", "1 after a failed audit, or while the engine is stuck", unwell)

    def _pages(self, by_group: dict[str, dict[str, int]]) -> Iterator[Metric]:
        text, labels = "Pages of a cache group by owner; they add up to capacity", [MODEL, "group"]
        pages = GaugeMetricFamily("freehold_pages", text, labels=[*labels, "owner"])
        capacities = GaugeMetricFamily("freehold_page_capacity", "Pages of a cache group", labels=labels)
        for group, counts in by_group.items():
            for owner, count in counts.items():
                if owner != "capacity":
                    pages.add_metric([self._model, group, owner], count)
            capacities.add_metric([self._model, group], counts["capacity"])
        yield pages
        yield capacities

    def _tiers(self, stats: Stats) -> Iterator[Metric]:
        """Yield the tiers' metrics. There are none without a tier below the device."""
        tiers = stats.tiers
        if tiers is None:
            return
        pages = GaugeMetricFamily("freehold_host_pages", "Host pages by owner", labels=[MODEL, "group", "owner"])
        for group, counts in tiers.host_pages.items():
            for owner, count in counts.items():
                pages.add_metric([self._model, group, owner], count)
        yield pages
        by_kind = tiers.transfers.items()
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        flying = {kind: counts.in_flight for kind, counts in by_kind}
        ended = {kind: counts.ended for kind, counts in by_kind}
        failed = {kind: counts.failed for kind, counts in by_kind}
        seconds = {kind: counts.seconds for kind, counts in by_kind}
        yield self._labelled(counter, "freehold_moved_pages", "Pages copied between tiers", "kind", tiers.moved_pages)
        yield self._labelled(counter, "freehold_lost_pages", "Pages that were not copied", "reason", tiers.lost_pages)
        yield self._labelled(gauge, "freehold_queued_pages", "Pages waiting to be copied", "kind", tiers.queued_pages)
        yield self._labelled(gauge, "freehold_transfers", "Transfers in flight", "kind", flying)
        yield self._labelled(counter, "freehold_transfers_ended", "Transfers that have ended", "kind", ended)
        yield self._labelled(counter, "freehold_transfers_failed", "Transfers that failed", "kind", failed)
        unavailable = GaugeMetricFamily("freehold_storage_unavailable", "1 while storage is not used", labels=[MODEL])
        unavailable.add_metric([self._model], float(stats.storage_trouble is not None))
        yield unavailable
        yield self._labelled(counter, "freehold_transfer_seconds", "Seconds that transfers took", "kind", seconds)

    def _labelled(
        self,
        family: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        label: str,
        values: Mapping[str, float],
    ) -> Metric:
        """Return a metric with one sample per label value."""
        metric = family(name, text, labels=[MODEL, label])
        for value, count in values.items():
            metric.add_metric([self._model, value], count)
        return metric

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=[MODEL])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=[MODEL])
        family.add_metric([self._model], value)
        return family


class Metrics:
    """The metrics registry of one app."""

    def __init__(self, engine: AsyncEngine, model_name: str):
        self._model = model_name
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine, model_name))

        def histogram(name: str, text: str) -> Histogram:
            family = Histogram(name, text, [MODEL], buckets=_SECONDS, registry=self._registry)
            return family.labels(model_name)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, [MODEL], registry=self._registry).labels(model_name)

        self._first_token = histogram("vllm:time_to_first_token_seconds", "From arrival to the first token")
        self._between = histogram("vllm:inter_token_latency_seconds", "Between tokens of one output")
        self._whole = histogram("vllm:e2e_request_latency_seconds", "From arrival to the end")
        self._queued = histogram("vllm:request_queue_time_seconds", "From arrival to the first scheduling")
        self._success = Counter(
            "vllm:request_success", "Outputs ended", [MODEL, "finished_reason"], registry=self._registry
        )
        self._prompt = counter("vllm:prompt_tokens", "Prompt tokens of ended outputs")
        self._generated = counter("vllm:generation_tokens", "Tokens generated")
        self._queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
        self._hits = counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache")

    def observe(self, delta: Delta, arrival: float, last: dict[int, float]) -> None:
        """Record a delta's latencies. `last` holds the time of each output's previous delta."""
        now = time.monotonic()
        if delta.tokens:
            before = last.get(delta.index)
            if before is None:
                self._first_token.observe(now - arrival)
            else:
                self._between.observe(now - before)
            last[delta.index] = now
            self._generated.inc(len(delta.tokens))
        if delta.ended:
            self._whole.observe(now - arrival)
            self._queued.observe(delta.ended.queued)
            self._success.labels(self._model, delta.ended.kind).inc()
            self._prompt.inc(delta.ended.prompt_tokens)
            self._queries.inc(delta.ended.prompt_tokens)
            self._hits.inc(delta.ended.cached_tokens)

    def render(self) -> bytes:
        return generate_latest(self._registry)
