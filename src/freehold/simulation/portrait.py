"""A comparable form of a small world's state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from freehold.memory.prefix.node import Node
from freehold.scheduler.request import Request
from freehold.scheduler.scheduler import Scheduler
from freehold.simulation.engine import SimulatedEngine
from freehold.simulation.mover import SimulatedMover


class Portrait:
    """A state without arbitrary names."""

    def __init__(
        self, scheduler: Scheduler, engine: SimulatedEngine, mover: SimulatedMover | None,
        requests: Sequence[Request],
    ):  # fmt: skip
        self._mover = mover
        self._memory, self._engine, self._scheduler = scheduler.memory, engine, scheduler
        self._requests = requests
        self._names: list[dict[int, int]] = [{} for _ in self._memory.pools]

    def everything(self) -> list[Any]:
        scheduler = self._scheduler
        queue = list(scheduler.queue.in_turn())
        return [
            [self._request(request) for request in self._requests],
            [(request.id, scheduler.queue.is_due(request)) for request in queue],
            [self._row(row) for row in scheduler.running.order.tolist()],
            [self._tree(root) for root in sorted(self._roots(), key=lambda node: node.namespace)],
            [(name, self._fence(tail.fence), tail.end, self._pages(tail.pages)) for name, tail in self._memory.tails],
            self._engine.queued_steps(),
            [sorted((self._fence(f), len(p)) for f, p in pool.limbo_pages().items()) for pool in self._memory.pools],
            [pool.free_count for pool in self._memory.pools],
            sorted(self._fence(fence) for fence, _ in self._memory.leases.limbo_rows),
            self._memory.leases.free_row_count,
            scheduler.paused,
            scheduler.growth.share,
            self._deeper(),
        ]

    def _request(self, request: Request) -> Any:
        deeper = request.deeper
        waits_for = self._scheduler.loading.is_awaited(request), deeper.load_count, deeper.begin, deeper.end
        is_new = request.cached_tokens is None
        return request.state, len(request.output), request.setbacks, is_new, request.finish, waits_for

    def _deeper(self) -> Any:
        """Return the state of host and transfers."""
        tiers, mover = self._memory.tiers, self._mover
        if tiers is None or mover is None:
            return None
        names: dict[int, int] = {}

        def named(pages: Any) -> list[int]:
            return [names.setdefault(page, len(names)) for page in pages.tolist()]

        host = tiers.host.pages[0]
        entries = [
            (key, host.is_mirror(key), int(host.readers[page]), names.setdefault(page, len(names)))
            for key, page in host.entries()
        ]
        transfers = [
            (
                one.order.kind, named(one.order.host[0]), self._pages([one.order.device[0]]),
                [len(part) for part in one.device], None if one.hold is None else (one.hold.kind, one.hold.node.end),
                self._fence(one.fence), one.order.number in mover.pending,
            )
            for one in tiers.transfers
        ]  # fmt: skip
        backup = tiers.backup
        return entries, transfers, backup.portrait(), host.pool.free_count

    def _row(self, row: int) -> Any:
        running, leases = self._scheduler.running, self._memory.leases
        lease = leases.leases[row]
        assert lease is not None
        columns = (running.length, running.scheduled, running.most, running.unsure, running.prefill_end)
        numbers = [int(column[row]) for column in columns]
        extent = (lease.shared, lease.committed, lease.reserved, lease.allocated)
        pages = self._pages(lease.pages(0, lease.allocated))
        return running.request(row).id, numbers, extent, pages, self._fence(int(leases.fence[row]))

    def _roots(self) -> list[Node]:
        return [node for node in self._memory.tree.nodes() if node.parent is None]

    def _tree(self, node: Node) -> Any:
        newer = [other.serial for other in self._memory.tree.nodes() if other.last_used > node.last_used]
        children = sorted(node.children.values(), key=lambda child: child.tokens.tolist())
        return (
            node.namespace, node.tokens.tolist(), node.pins, node.level, self._fence(node.fence), len(newer),
            self._pages(node.pages), [self._tree(child) for child in children],
        )  # fmt: skip

    def _fence(self, fence: int) -> int:
        return max(fence - self._memory.epochs.completed, 0)

    def _pages(self, pages: list[Any]) -> Any:
        """Return pages by name, with their content."""
        return [
            [(names.setdefault(page, len(names)), self._engine.content(page, group)) for page in part.tolist()]
            for group, (names, part) in enumerate(zip(self._names, pages, strict=True))
        ]
