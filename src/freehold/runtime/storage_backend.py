"""The storage behind the host, attached, detached and cleared while the engine runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from freehold.config import EngineConfig
from freehold.contract.errors import BadRequest, Conflict
from freehold.engine.page_mover import PageMover
from freehold.memory import Memory, PrefetchPolicy
from freehold.memory.tiers.tiers import Tiers
from freehold.runtime.tier_plan import check_capacity, open_storage, place_of

FIELD = "hicache_storage_backend"


class BackendState(StrEnum):
    """What the backend is doing."""

    ATTACHED = "attached"
    DETACHED = "detached"
    ATTACHING = "attaching"
    DETACHING = "detaching"
    CLEARING = "clearing"


@dataclass(frozen=True)
class Backend:
    """Which store, where, and how long requests wait for it."""

    kind: str
    location: str
    capacity_bytes: int
    prefetch_policy: PrefetchPolicy

    @classmethod
    def at(cls, kind: str, location: str | None, capacity_bytes: int, prefetch_policy: PrefetchPolicy) -> Backend:
        """Raise InvalidParameter for a location of another kind."""
        return cls(kind, place_of(kind, location), capacity_bytes, prefetch_policy)

    @classmethod
    def of(cls, config: EngineConfig) -> Backend | None:
        """Return the backend that a configuration names, or None."""
        kind, policy = config.hicache_storage_backend, PrefetchPolicy(config.hicache_storage_prefetch_policy)
        if kind is None:
            return None
        return cls.at(kind, config.hicache_storage_location, config.hicache_storage_capacity, policy)


@dataclass(frozen=True)
class _Work:
    """Something that takes long, in a thread, and what is done in the scheduler's thread when it has ended: `then` if
    it has not failed, and `finally_` always."""

    state: BackendState
    result: Future[Any]
    then: Callable[[Any], None]
    finally_: Callable[[], None] = lambda: None


class StorageBackend:
    """Called by the scheduler's thread. Opening, clearing and closing a store take time, so a thread does that;
    `settle`, called in every turn, ends what the thread is done with. One thing is done at a time."""

    def __init__(self, memory: Memory, mover: PageMover | None, backend: Backend | None):
        self._memory = memory
        self._mover = mover
        self._backend = backend
        self._thread = ThreadPoolExecutor(1, "kv-backend")
        self._work: _Work | None = None
        self._error: str | None = None

    def attach(self, backend: Backend, must_answer: bool = True) -> None:
        """Begin to open a store; then it gets what the host has. Raises BadRequest or Conflict."""
        self._check_free(is_attached=False)
        mover, tiers = self._tiered()
        check_capacity(backend.capacity_bytes, tiers.plan.page_bytes)
        opened = self._thread.submit(open_storage, backend.location, backend.capacity_bytes, must_answer)

        def then(store: Any) -> None:
            mover.attach(store)
            tiers.attach(backend.prefetch_policy)
            self._backend = backend

        self._work = _Work(BackendState.ATTACHING, opened, then)

    def attach_again(self, backend: Backend) -> None:
        """Attach the store of the process before and wait for it. If it can't be opened the engine serves without it,
        and `status` says why until another one is attached or this one is detached."""
        self.attach(backend, must_answer=False)
        assert self._work is not None
        wait([self._work.result])
        self.settle()
        if self._error is not None:
            print(f"freehold: serving without storage: {self._error}", file=sys.stderr, flush=True)

    def detach(self) -> None:
        """Give the store no more orders, and close it when its pending orders are done. A store that could not be
        attached is not tried again. Raises BadRequest or Conflict."""
        if self._backend is None and self._error is not None:
            self._error = None
            return
        self._check_free(is_attached=True)
        mover, tiers = self._tiered()
        tiers.detach()
        storage = mover.detach()
        assert storage is not None
        self._backend = None
        self._work = _Work(BackendState.DETACHING, self._thread.submit(storage.close), lambda _: None)

    def clear(self) -> None:
        """Delete all entries once the queued ones are stored. Return before that. Raises BadRequest or Conflict."""
        self._check_free(is_attached=True)
        mover, tiers = self._tiered()
        storage = tiers.storage
        assert storage is not None
        assert mover.storage is not None
        cleared = mover.storage.clear()
        storage.forget_stored()
        # Forget once more at the end: pages fetched meanwhile may be deleted, and so may some if it failed.
        self._work = _Work(BackendState.CLEARING, cleared, lambda _: None, storage.forget_stored)

    def status(self) -> dict[str, Any]:
        """Return the backend, what is being done, why the last order failed, and the store's trouble."""
        self.settle()
        backend = self._backend
        return {
            "hicache_storage_backend": None if backend is None else backend.kind,
            "hicache_storage_location": None if backend is None else backend.location,
            "hicache_storage_capacity": None if backend is None else backend.capacity_bytes,
            "hicache_storage_prefetch_policy": None if backend is None else backend.prefetch_policy.value,
            "state": self._state.value,
            "error": self._error,
            "trouble": self.trouble,
        }

    @property
    def trouble(self) -> str | None:
        """Why the store is left alone, or None. The engine serves without it meanwhile."""
        storage = None if self._mover is None else self._mover.storage
        return None if storage is None else storage.trouble

    @property
    def _state(self) -> BackendState:
        if self._work is not None:
            return self._work.state
        return BackendState.DETACHED if self._backend is None else BackendState.ATTACHED

    def settle(self) -> None:
        """End what the thread is done with."""
        work = self._work
        if work is None or not work.result.done():
            return
        self._work = None
        work.finally_()
        error = work.result.exception()
        if error is None:
            work.then(work.result.result())
        else:  # whatever a store's library raises
            self._error = f"{work.state.value} failed: {error}"

    def _check_free(self, is_attached: bool) -> None:
        self.settle()
        self._tiered()
        if self._work is not None:
            raise Conflict(f"the storage backend is {self._work.state.value}: ask again when that is done")
        if is_attached and self._backend is None:
            raise Conflict("there is no storage backend: PUT /hicache/storage-backend attaches one")
        if not is_attached and self._backend is not None:
            raise Conflict(f"there is a storage backend ({self._backend.kind}): DELETE it first", FIELD)
        self._error = None

    def _tiered(self) -> tuple[PageMover, Tiers]:
        if self._mover is None or self._memory.tiers is None:
            raise BadRequest("there is no host tier for pages to pass through: start with --enable-hierarchical-cache")
        return self._mover, self._memory.tiers
