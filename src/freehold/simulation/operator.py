"""An operator's requests to a running engine: at once, or in slices while the engine runs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from freehold.contract.adapter import fingerprint_of
from freehold.contract.errors import BadRequest
from freehold.contract.orders import Kind
from freehold.memory import Memory, Namespace, PrefetchPolicy
from freehold.memory.explain import explain, explain_miss
from freehold.memory.tiers.counts import count_tiers, describe_tiers
from freehold.memory.tiers.tiers import Tiers
from freehold.scheduler.request import Request
from freehold.scheduler.scheduler import PauseMode
from freehold.simulation.assembly import SimulatedServer, SimulatedTiers
from freehold.simulation.engine import TORN
from freehold.simulation.happenings import Verb
from freehold.simulation.mover import ORDER_S

LOOKS = 20  # at the progress of saving
PAGES = 8  # explained at a time, of each group


class Operator:
    """Applies settings again to later engines. `tiers` has the storage attached now."""

    def __init__(self, tiers: SimulatedTiers | None, clock: Callable[[], float], requests: Mapping[str, Request]):
        self.tiers = tiers
        self._clock = clock
        self._requests = requests
        self._settings: dict[Verb, dict[str, Any]] = {}

    def take_over(self, server: SimulatedServer) -> None:
        """Apply the settings to a new engine. Work in slices on the last one is lost."""
        self._scheduler, self._memory, self._mover = server.scheduler, server.memory, server.mover
        self._slices: list[Generator[None, None, Any]] = []
        self._has_changed_storage = False
        for verb, arguments in self._settings.items():
            self._set(verb, arguments)

    def ask(self, verb: Verb, arguments: dict[str, Any]) -> None:
        if verb in (Verb.PAUSE, Verb.RESUME, Verb.WEIGHTS):
            self._set(verb, arguments)
            if arguments.get("source") not in TORN:
                self._settings = {**self._settings, verb: arguments}
            if verb is Verb.RESUME:
                self._settings.pop(Verb.PAUSE, None)
        elif verb is Verb.FLUSH:
            self._slices.append(self._memory.flushing())
        elif verb is Verb.RECOUNT:
            self._slices.append(_generator(self._scheduler.recounting()))
        elif verb is Verb.PIN:
            self._pin(arguments)
        elif verb is Verb.UNPIN:
            self._memory.pins.unpin(arguments["name"])
        elif verb is Verb.EXPLAIN and arguments["id"] in self._requests:
            self._explain(self._requests[arguments["id"]], random.Random(arguments["id"]))
        elif self._memory.tiers is not None and verb is Verb.SAVE and arguments["id"] in self._requests:
            self._slices.append(self._saving(self._memory.tiers, self._requests[arguments["id"]]))
        elif self._memory.tiers is not None and verb in (Verb.ATTACH, Verb.DETACH, Verb.CLEAR):
            self._slices.append(self._storage(self._memory.tiers, verb, arguments))

    def advance(self) -> None:
        """Run a slice of each pending piece of work. Transfers may have ended that the scheduler has not processed
        yet."""
        self._slices = [work for work in self._slices if _goes_on(work)]

    @property
    def is_busy(self) -> bool:
        return bool(self._slices)

    def _set(self, verb: Verb, arguments: dict[str, Any]) -> None:
        if verb is Verb.PAUSE:
            self._scheduler.pause(PauseMode(arguments["mode"]))
        elif verb is Verb.RESUME:
            self._scheduler.resume()
        else:
            self._load(arguments.get("source", ""))

    def _load(self, source: str) -> None:
        """Load weights. Weights that can't be loaded must change nothing."""
        try:
            self._scheduler.update_weights(source)
        except BadRequest:
            assert source in TORN, f"weights '{source}' were refused"
        else:
            assert source not in TORN, "weights that can't be loaded are in use"

    def _pin(self, arguments: dict[str, Any]) -> None:
        pins = self._memory.pins
        if arguments["name"] not in {pin.name for pin in pins}:
            expires = None if arguments["ttl"] is None else self._clock() + arguments["ttl"]
            self._memory.pin(arguments["name"], "", np.array(arguments["tokens"], np.int32), expires)
            assert pins.page_count <= pins.limit, "pinned more than the budget"

    def _explain(self, request: Request, rng: random.Random) -> None:
        """Check that explanations and counts are consistent and change nothing."""
        memory = self._memory
        before = _traces(memory)
        for group, pool in enumerate(memory.pools):
            of_each_owner = np.unique(pool.owner, return_index=True)[1].tolist()
            for page in rng.sample(of_each_owner, min(PAGES, len(of_each_owner))):
                assert explain(memory, page, group).startswith(f"page {page}: ")
            assert sum(memory.counts(group).as_dict().values()) == 2 * pool.capacity
        adapter = fingerprint_of(request.adapter)
        str(explain_miss(memory, memory.match(request.namespace, request.tokens, adapter=adapter), request.tokens))
        if memory.tiers is not None:
            told = describe_tiers(memory.tiers)
            assert sum(one["in_flight"] for one in told["transfers"].values()) == len(memory.tiers.transfers)
            for pages in told["host_pages"].values():
                assert sum(pages.values()) == 2 * pages["capacity"]
        assert self._scheduler.waits_for()
        assert not (self._scheduler.is_idle and self._scheduler.in_flight_count)
        assert _traces(memory) == before, "an explanation has changed what it explains"

    def check_counts(self) -> None:
        """Check that the tiers' counts match the mover's, with an engine at rest."""
        tiers, mover = self._memory.tiers, self._mover
        if tiers is None or mover is None:
            return
        told = count_tiers(tiers)
        for kind in Kind:
            counts = told.transfers[kind.value]
            assert (counts.in_flight, counts.ended, counts.failed) == (0, mover.ended[kind], mover.failed[kind]), kind
            assert math.isclose(counts.seconds, ORDER_S * counts.ended, abs_tol=1e-9), f"{counts.seconds} s of {kind}"
            moved = told.moved_pages.get(kind.value, 0)
            is_known = kind in (Kind.FETCH, Kind.STORE) and not self._has_changed_storage and tiers.storage is not None
            is_known |= kind is Kind.BACKUP and tiers.backup.abandoned == 0
            assert moved == mover.moved[kind] if is_known else moved <= mover.moved[kind], f"{moved} pages of {kind}"
        if not self._has_changed_storage and tiers.storage is not None:
            lost = mover.ordered[Kind.STORE] - mover.moved[Kind.STORE]
            assert told.lost_pages["not_stored"] == lost, f"{told.lost_pages}, {lost} were not stored"

    def _namespace(self, request: Request) -> Namespace:
        return self._memory.tree.namespace(request.namespace, fingerprint_of(request.adapter))

    def _saving(self, tiers: Tiers, request: Request) -> Generator[None, None, bool]:
        """Have a sequence saved. Return whether the deepest tier has all of it."""
        saving = tiers.saving(self._namespace(request), request.tokens)
        for _ in range(LOOKS):
            saved = yield from saving.looking()
            assert max(saved.storage or 0, saved.host) <= saved.tokens, f"{saved}: more is saved than there is"
            if saved.is_whole:
                return True
            yield
        return False

    def _storage(self, tiers: Tiers, verb: Verb, arguments: dict[str, Any]) -> Generator[None, None, None]:
        """Change storage between two iterations, with transfers ended but not processed. Clearing a store takes effect
        at once."""
        yield
        assert self.tiers is not None
        self._has_changed_storage = True
        if verb is Verb.ATTACH and tiers.storage is None:
            policy = PrefetchPolicy(arguments["policy"])
            tiers.attach(policy)
            self.tiers = replace(self.tiers, prefetch_policy=policy)
        elif verb is Verb.DETACH:
            tiers.detach()
            self.tiers = replace(self.tiers, prefetch_policy=None)
        elif verb is Verb.CLEAR and tiers.storage is not None:
            self.tiers.storage.pages.clear()
            tiers.storage.forget_stored()


_OVER = object()


def _goes_on(work: Iterator[None]) -> bool:
    return next(work, _OVER) is not _OVER


def _generator(work: Iterator[None]) -> Generator[None, None, None]:
    yield from work


def _traces(memory: Memory) -> Any:
    """Return all that a use of the caches would change."""
    nodes = [(node.serial, node.last_used, node.hits, node.holds, tuple(node.pins)) for node in memory.tree.nodes()]
    host = [] if memory.tiers is None else [list(pages.entries()) for pages in memory.tiers.host.pages]
    counts = [memory.counts(group) for group in range(len(memory.groups))]
    return memory.tree.version, nodes, host, counts, len(memory.tails), len(memory.pins)
