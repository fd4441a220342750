"""Procedures of the engine process that the HTTP process calls."""

from __future__ import annotations

import heapq
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Generator
from dataclasses import asdict
from typing import Any

import numpy as np

from freehold.contract.adapter import fingerprint_of
from freehold.contract.arrays import Int32
from freehold.contract.errors import BadRequest, Conflict, NotFound
from freehold.ipc import protocol as msg
from freehold.ipc.adapter_loads import AdapterLoads
from freehold.memory import Lease, Match, Namespace, PinnedPrefix, PinRefused, PrefetchPolicy
from freehold.memory.explain import NoSuchPage, explain, explain_miss
from freehold.memory.prefix.node import Node
from freehold.memory.tiers.counts import describe_tiers
from freehold.runtime.storage_backend import Backend, StorageBackend
from freehold.scheduler.parked import Parked
from freehold.scheduler.request import Request
from freehold.scheduler.scheduler import PauseMode, Scheduler

REMEMBERED_REQUESTS = 1024
TOP_PREFIXES = 20
NODES_AT_ONCE = 128  # per slice
SAVE_POLL_S = 0.05  # between checks of a save


class Procedures:
    """Procedures called by name between two steps, in the scheduler's thread."""

    def __init__(self, scheduler: Scheduler, storage: StorageBackend, parked: Parked, adapters: AdapterLoads):
        self._scheduler = scheduler
        self._adapters = adapters
        self._ended: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._procedures: dict[str, Callable[[Any], Any]] = {
            "memory": lambda _: self._memory(),
            "page": self._page,
            "request": self._request,
            "cache": lambda _: self._cache(),
            "miss": self._miss,
            "lookup": self._lookup,
            "prefetch": self._prefetch,
            "save": self._save,
            "storage": lambda _: storage.status(),
            "attach_storage": lambda wanted: storage.attach(_backend(wanted)),
            "detach_storage": lambda _: storage.detach(),
            "clear_storage": lambda _: storage.clear(),
            "pins": lambda _: self._pins(),
            "pin": self._pin,
            "unpin": scheduler.memory.pins.unpin,
            "flush": lambda _: scheduler.memory.flushing(),
            "idle": lambda _: scheduler.is_idle and not parked,
            "paused": lambda _: scheduler.paused is not None,
            "pause": lambda mode: scheduler.pause(PauseMode(mode)),
            "resume": lambda _: scheduler.resume(),
            "update_weights": scheduler.updating_weights,
            "load_adapter": adapters.load,
            "unload_adapter": adapters.unload,
        }

    def start(self, call: msg.Call) -> Any:
        """Start a procedure. Return its result, a future of it, or a generator that computes it in slices. Raises what
        the procedure raises."""
        return self._procedures[call.procedure](call.argument)

    def _namespace(self, argument: dict[str, Any]) -> Namespace:
        """Return the namespace of a tenant's salt and an adapter's name, if given."""
        adapter = self._adapters.find(argument.get("adapter", ""))
        return self._scheduler.memory.tree.namespace(argument["namespace"], fingerprint_of(adapter))

    def _match(self, argument: dict[str, Any], tokens: Int32) -> Match:
        namespace = self._namespace(argument)
        return self._scheduler.memory.match(namespace.salt, tokens, adapter=namespace.adapter)

    def remember(self, request: Request) -> None:
        """Keep the cards of the most recently ended requests."""
        self._ended[request.id] = _request_card(request)
        if len(self._ended) > REMEMBERED_REQUESTS:
            self._ended.popitem(last=False)

    def _memory(self) -> Generator[None, None, dict[str, Any]]:
        """Recount page ownership and describe it."""
        scheduler = self._scheduler
        yield from scheduler.recounting()
        memory = scheduler.memory
        leases: list[dict[str, Any]] = []
        for lease in memory.leases.open_leases:
            if lease.is_open:
                leases.append(self._lease_card(lease))
                yield
        return {
            "page_size": memory.page_size,
            "pages": memory.counts().as_dict(),
            "groups": [
                {"name": group.name, "lookback": group.lookback, "pages": memory.counts(number).as_dict()}
                for number, group in enumerate(memory.groups)
            ],
            "page_ages_in_steps": memory.tree.history.ages.as_dict(),
            "epoch": {"submitted": memory.epochs.submitted, "completed": memory.epochs.completed},
            "weights": memory.tree.weights,
            "waiting": len(scheduler.queue),
            "waits_for": scheduler.waits_for(),
            "leases": leases,
            **({} if memory.tiers is None else {"tiers": describe_tiers(memory.tiers)}),
        }

    def _lease_card(self, lease: Lease) -> dict[str, Any]:
        memory, running = self._scheduler.memory, self._scheduler.running
        request = running.request(lease.row)
        numbers = {name: getattr(lease, name) for name in ("row", "shared", "committed", "reserved", "allocated")}
        length = int(running.length[lease.row])
        rows = [memory.leases.row_pages(lease.row, group) for group in range(len(memory.groups))]
        pages = [int(np.count_nonzero(row)) for row in rows]
        return {"request": request.id, "state": request.state.value, **numbers, "length": length, "pages": pages}

    def _page(self, argument: dict[str, int]) -> str:
        try:
            return explain(self._scheduler.memory, argument["page"], argument["group"])
        except NoSuchPage as error:
            raise BadRequest(str(error), str(error).split()[0]) from error

    def _cache(self) -> Generator[None, None, dict[str, Any]]:
        """Describe the whole prefix cache, with its most hit prefixes, longest first among equals."""
        memory = self._scheduler.memory
        best: list[Node] = []
        nodes = memory.tree.nodes()
        while batch := list(itertools.islice(nodes, NODES_AT_ONCE)):
            there = [node for node in (*best, *batch) if memory.tree.has(node) and node.parent is not None]
            best = heapq.nlargest(TOP_PREFIXES, there, key=lambda node: (node.hits, node.end))
            yield
        return {
            "page_size": memory.page_size,
            "pages": memory.counts().as_dict(),
            "page_ages_in_steps": memory.tree.history.ages.as_dict(),
            "evicted_pages": memory.tree.evictor.evicted_page_count,
            "parked_sessions": len(memory.tails),
            "retained_pages": memory.tree.hints.page_count,
            "pinned_pages": {"budget": memory.pins.limit, "pinned": memory.pins.page_count},
            **({} if memory.tiers is None else {"tiers": describe_tiers(memory.tiers)}),
            "top_prefixes": [
                {
                    "namespace": node.namespace.salt,
                    "tokens": [node.start, node.end],
                    "first_token_ids": node.tokens[:8].tolist(),
                    "hits": node.hits,
                    "idle_steps": memory.epochs.submitted - node.used_at,
                    "in_use": node.holds > 0,
                    "retention_priority": node.level,
                }
                for node in best
            ],
        }

    def _request(self, name: str) -> dict[str, Any]:
        """Return a request's card. `name` is its id, or that of the answer whose first output it is."""
        for one in (name, f"{name}-0", f"{name}-0-0"):
            request = self._scheduler.requests.get(one)
            if request is not None:
                return _request_card(request)
            if one in self._ended:
                return self._ended[one]
        raise NotFound(f"no request '{name}' among those that run and the last {REMEMBERED_REQUESTS} that ended")

    def _lookup(self, argument: dict[str, Any]) -> Generator[None, None, dict[str, Any]]:
        """Report how much of a sequence is cached now, including a session's tail."""
        memory = self._scheduler.memory
        tokens = _tokens(argument)
        place = self._namespace(argument)
        hit = memory.look_up(place.salt, tokens, adapter=place.adapter, session=argument["session"] or None)
        match, tail = hit.match, hit.tail
        tail_tokens = 0 if tail is None else tail.end - tail.start
        found = {"tree_tokens": match.length, "tail_tokens": tail_tokens, "tokens": match.length + tail_tokens}
        return {**found, **(yield from self._on_host(match, tokens))}

    def _on_host(self, match: Match, tokens: Int32) -> Generator[None, None, dict[str, int]]:
        """Return how many tokens after a match the host would load; {} without a host tier."""
        tiers = self._scheduler.memory.tiers
        if tiers is None:
            return {}
        plan = yield from tiers.loads.planning(match, tiers.keys(match.namespace, tokens), len(tokens) - 1)
        return {"host_tokens": 0 if plan is None else plan.gain}

    def _prefetch(self, argument: dict[str, Any]) -> Generator[None, None, dict[str, Any]]:
        """Fetch a sequence's pages from storage to the host."""
        memory = self._scheduler.memory
        if memory.tiers is None or memory.tiers.storage is None:
            raise BadRequest("there is no storage to fetch from: start with --hicache-storage-backend")
        tokens = _tokens(argument)
        namespace = self._namespace(argument)
        now = self._scheduler.lifecycle.clock()
        keys = memory.tiers.keys(namespace, tokens)
        begun = yield from memory.tiers.storage.prefetching(namespace, keys, len(tokens), now)
        return {"asked_tokens": len(tokens), "fetching": begun is not None}

    def _save(self, argument: dict[str, Any]) -> Generator[float | None, None, dict[str, Any]]:
        """Copy a sequence to the deepest tier. Return its progress once complete, or after `timeout` seconds."""
        memory, clock = self._scheduler.memory, time.monotonic
        if memory.tiers is None:
            raise BadRequest("there is no tier to save to: start with --enable-hierarchical-cache")
        end = clock() + argument["timeout"]
        namespace, tokens = self._namespace(argument), _tokens(argument)
        saving, storage = memory.tiers.saving(namespace, tokens), memory.tiers.storage
        if storage is not None:  # tokens only in storage count as well
            keys = memory.tiers.keys(namespace, tokens)
            coming = yield from storage.prefetching(namespace, keys, len(tokens), self._scheduler.lifecycle.clock())
            while coming is not None and storage.is_coming(coming) and clock() < end:
                yield SAVE_POLL_S
            if coming is not None:
                coming.wanted_by -= 1
        while True:
            saved = yield from saving.looking()
            is_complete = saved.is_whole and (saved.tokens > 0 or len(tokens) <= memory.shape.page_size)
            if is_complete and storage is not None:
                is_complete = yield from _answer(saving.asking(), end)
            if is_complete or saved.tokens == 0 or clock() >= end:
                return {**asdict(saved), "is_complete": is_complete}
            yield min(SAVE_POLL_S, max(0.0, end - clock()))

    def _pins(self) -> dict[str, Any]:
        memory = self._scheduler.memory
        return {
            "object": "list",
            "data": [_pin_card(pin, self._scheduler.lifecycle.clock()) for pin in memory.pins],
            "pages": {"budget": memory.pins.limit, "pinned": memory.pins.page_count},
            "given_up": memory.pins.given_up_count,
        }

    def _pin(self, argument: dict[str, Any]) -> dict[str, Any]:
        memory, now = self._scheduler.memory, self._scheduler.lifecycle.clock()
        tokens = _tokens(argument)
        expires = None if argument["ttl"] is None else now + argument["ttl"]
        place = self._namespace(argument)
        try:
            pin = memory.pin(argument["id"], place.salt, tokens, expires, place.adapter)
        except PinRefused as error:
            raise Conflict(str(error), "id") from error
        kept = {"id": argument["id"], "object": "cache.pin", "kept_tokens": 0} if pin is None else _pin_card(pin, now)
        return {**kept, "asked_tokens": len(tokens), "pages": self._pins()["pages"]}

    def _miss(self, argument: dict[str, Any]) -> Generator[None, None, dict[str, Any]]:
        memory, tokens = self._scheduler.memory, _tokens(argument)
        match = self._match(argument, tokens)
        miss = explain_miss(memory, match, tokens)
        return {
            **(yield from self._on_host(match, tokens)),
            "tokens": miss.wanted,
            "cached_tokens": miss.cached,
            "reason": miss.reason,
            "common_tokens": miss.common,
            "ours": miss.ours,
            "theirs": miss.theirs,
            "explanation": str(miss),
        }


def _tokens(argument: dict[str, Any]) -> Int32:
    return np.frombuffer(argument["tokens"], np.int32)


def _backend(wanted: dict[str, Any]) -> Backend:
    return Backend.at(**{**wanted, "prefetch_policy": PrefetchPolicy(wanted["prefetch_policy"])})


def _pin_card(pin: PinnedPrefix, now: float) -> dict[str, Any]:
    seconds = None if pin.expires is None else pin.expires - now
    return {
        "id": pin.name,
        "object": "cache.pin",
        "namespace": pin.salt,
        "kept_tokens": pin.tokens,
        "expires_in": seconds,
    }


def _request_card(request: Request) -> dict[str, Any]:
    """Describe a request's life so far."""
    return {
        "id": request.id,
        "state": request.state.value,
        "finish": None if request.finish is None else request.finish.kind.value,
        "message": "" if request.finish is None else request.finish.message,
        "client": request.client,
        "prompt_tokens": len(request.prompt),
        "cached_tokens": request.cached_by_tier,
        "miss": request.miss,
        "retention": None if request.retention is None else asdict(request.retention),
        "retained_tokens": request.retained_tokens,
        "retractions": request.retractions,
        "drafted_tokens": request.drafted,
        "accepted_tokens": request.accepted,
        "seconds_in": {state.value: seconds for state, seconds in request.seconds_in.items()},
    }


def _answer(asking: Generator[None, None, bool], end: float) -> Generator[float, None, bool]:
    """Return the answer of storage, or False if none arrives before `end`."""
    while time.monotonic() < end:
        try:
            next(asking)
        except StopIteration as answered:
            return answered.value
        yield SAVE_POLL_S
    return False
