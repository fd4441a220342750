"""Bugs to plant, one at a time: what each is, and the class of public bugs that it stands for.

`old` occurs exactly once in `file`; the runner says so if the source has moved on.
"""

from __future__ import annotations

from dataclasses import dataclass

FREED_IN_USE = "something in flight still uses a freed page"
WRONG_CONTENT = "wrong content served for a key"
STARVATION = "starvation or crash under pressure"
LEAK_ON_ABORT = "leak on abort"
GROUPS_DISAGREE = "groups that disagree"
FAILURE_AS_SUCCESS = "failure treated as success"
ACK_LOST = "acknowledgement not processed"
PINS = "pins unbalanced"
DOUBLE_FREE = "double free"
LEASE = "a transition of the lease"
LIFE = "a transition of the request"
SPECULATION = "speculation"
RETENTION = "hints and quotas"


@dataclass(frozen=True)
class Mutant:
    name: str
    kind: str
    file: str
    old: str
    new: str


LEASE_PY, TREE_PY, POOL_PY = "memory/lease.py", "memory/tree.py", "memory/pool.py"
MEMORY_PY, EPOCHS_PY = "memory/memory.py", "memory/epochs.py"
ADMISSION_PY, RETENTION_PY, PINS_PY = "scheduler/admission.py", "memory/retention.py", "memory/pins.py"
PLANNER_PY, LIFECYCLE_PY, RESULTS_PY = "scheduler/planner.py", "scheduler/lifecycle.py", "scheduler/results.py"
SCHEDULER_PY, RUNNING_PY = "scheduler/scheduler.py", "scheduler/running.py"

MUTANTS = [
    # -- the five of the mission
    Mutant(
        "length inferred at release instead of recorded", "the mission, 1", LEASE_PY,
        "for pool, pages in zip(table.pools, self.pages(self.shared, self.allocated), strict=True):\n"
        "            pool.free(pages, self.owner, fence)\n        table.tree.unpin",
        "for pool, pages in zip(table.pools, self.pages(self.shared, self.committed), strict=True):\n"
        "            pool.free(pages, self.owner, fence)\n        table.tree.unpin",
    ),
    Mutant(
        "what the tree owns is not cut to whole pages", "the mission, 2", LEASE_PY,
        "end = usable - usable % table.page_size", "end = -(-usable // table.page_size) * table.page_size",
    ),
    Mutant(
        "a match that is rejected has taken something", "the mission, 3", ADMISSION_PY,
        "        if not self._fits_beside(request, match, reserved):\n            return _Verdict.NO_ROOM, 0\n",
        "        if not self._fits_beside(request, match, reserved):\n"
        "            memory.leases.open(match)\n            return _Verdict.NO_ROOM, 0\n",
    ),
    Mutant(
        "acknowledgements are processed only after a prefill", "the mission, 4", SCHEDULER_PY,
        "        self.memory.complete(step.number)\n",
        "        if (step.counts > 1).any():\n            self.memory.complete(step.number)\n",
    ),
    Mutant(
        "an engine thread frees", "the mission, 5", SCHEDULER_PY,
        "            self._in_flight.append(_InFlight(plan, self._engine.execute(plan)))\n",
        "            result = self._engine.execute(plan)\n"
        "            result.add_done_callback(lambda _: [pool.collect() for pool in self.memory.pools])\n"
        "            self._in_flight.append(_InFlight(plan, result))\n"
        "            import threading\n"
        "            held = self.memory.leases.open(self.memory.match('io', plan.tokens[:1]))\n"
        "            held.extend(1)\n"
        "            errors = []\n"
        "            def free():\n"
        "                try:\n                    held.release()\n"
        "                except Exception as error:\n                    errors.append(error)\n"
        "            thread = threading.Thread(target=free)\n            thread.start()\n            thread.join()\n"
        "            if errors:\n                raise errors[0]\n",
    ),
    # -- one or more for each class of public bugs
    Mutant("a freed page does not wait for its fence", FREED_IN_USE, POOL_PY,
           "if self.epochs.passed(fence):\n            self.move(pages, source, owner.FREE)",
           "if True:\n            self.move(pages, source, owner.FREE)"),
    Mutant("an evicted prefix does not wait for its readers", FREED_IN_USE, TREE_PY,
           "owner.node(node.serial), node.fence)", "owner.node(node.serial), 0)"),
    Mutant("a step does not fence the rows that it uses", FREED_IN_USE, LEASE_PY,
           "self.fence[rows] = step", "pass"),
    Mutant("a row is reused while a step writes for its last tenant", FREED_IN_USE, LEASE_PY,
           "self._limbo_rows.append((int(self.fence[row]), row))", "self._free_rows.append(row)"),
    Mutant("limbo is emptied one step early", FREED_IN_USE, EPOCHS_PY,
           "return fence <= self.completed", "return fence <= self.completed + 1"),
    Mutant("the root of a namespace is shared by all tenants", WRONG_CONTENT, TREE_PY,
           "        root = self._roots.get(namespace)\n        if root is None:",
           "        namespace = Namespace()\n        root = self._roots.get(namespace)\n        if root is None:"),
    Mutant("new weights keep the prefixes of the old ones", WRONG_CONTENT, MEMORY_PY,
           "        self.weight_version += 1\n        self.tails", "        self.tails"),
    Mutant("the first page of an edge stands for all of it", WRONG_CONTENT, TREE_PY,
           "differ = node.tokens[:count] != tokens[:count]",
           "differ = node.tokens[:count] != node.tokens[:count]"),
    Mutant("a split keeps the wrong pages", WRONG_CONTENT, TREE_PY,
           "node.pages = [part[page_cut:] for part in node.pages]\n",
           "node.pages = [part[: len(part) - page_cut] for part in node.pages]\n"),
    Mutant("duplicates are freed but the row still names them", WRONG_CONTENT, LEASE_PY,
           "            table._write(group, self.row, first, theirs[first : first + count])", "            pass"),
    Mutant("memory that ran out is an exception for everybody", STARVATION, PLANNER_PY,
           "        if not fits:\n            batch = self._retract_until_it_fits()", "        if False:\n            batch = self._retract_until_it_fits()"),
    Mutant("the most important request can be retracted, too", STARVATION, PLANNER_PY,
           "if len(self._running) == 1:", "if len(self._running) == 0:"),
    Mutant("a request passed over is never looked at again", STARVATION, ADMISSION_PY,
           "        for request in passed_over:\n            self._queue.push(request)\n", ""),
    Mutant("the most important running request is retracted first", STARVATION, PLANNER_PY,
           "key=lambda request: (request.priority, -request.order))", "key=lambda request: (-request.priority, request.order))"),
    Mutant("excess of rejected drafts is never taken back", STARVATION, MEMORY_PY,
           "            self.leases.give_back_excess()\n", "            pass\n"),
    Mutant("an aborted request keeps its lease", LEAK_ON_ABORT, LIFECYCLE_PY,
           "        if request.lease is not None:\n            self._leave_row(request, finish",
           "        if request.lease is not None and finish.kind is not FinishKind.ABORT:\n            self._leave_row(request, finish"),
    Mutant("an aborted waiting request stays in the queue", LEAK_ON_ABORT, LIFECYCLE_PY,
           "            self.queue.discard(request)", "            pass"),
    Mutant("the pages of one group are not released", GROUPS_DISAGREE, LEASE_PY,
           "        for pool, pages in zip(table.pools, self.pages(self.shared, self.allocated), strict=True):",
           "        for pool, pages in zip(table.pools[:1], self.pages(self.shared, self.allocated)[:1], strict=True):"),
    Mutant("eviction forgets the second group", GROUPS_DISAGREE, TREE_PY,
           "        for pages, freed in zip(node.pages, given, strict=True):",
           "        for pages, freed in zip(node.pages[:1], given[:1], strict=True):"),
    Mutant("a hit restores the pages of one group only", GROUPS_DISAGREE, LEASE_PY,
           "        path = self.tree.path(node)\n        for group in range(len(self.pools)):",
           "        path = self.tree.path(node)\n        for group in range(1):"),
    Mutant("a failed step counts as completed", FAILURE_AS_SUCCESS, SCHEDULER_PY,
           "            self.results.fail(step.rows[live], error)", "            self.memory.leases.commit(step.rows, step.starts + step.counts, self.running.scheduled[step.rows])"),
    Mutant("an allocation that fails has taken what there was", FAILURE_AS_SUCCESS, POOL_PY,
           "        if count > self.free_count:\n            raise OutOfPages(",
           "        if count > self.free_count:\n            self.allocate(owners[: self.free_count])\n            raise OutOfPages("),
    Mutant("a completed step is forgotten if an older one is running", ACK_LOST, EPOCHS_PY,
           "        while self.completed + 1 in self._early:", "        if self.completed + 1 in self._early:"),
    Mutant("limbo rows are never collected", ACK_LOST, MEMORY_PY, "        self.leases.collect()", "        pass"),
    Mutant("limbo pages are never collected", ACK_LOST, MEMORY_PY, "            pool.collect()", "            pass"),
    Mutant("a released lease keeps its pin", PINS, LEASE_PY,
           "        table.tree.unpin(self.node, PinKind.LEASE, fence)\n        table.close_row", "        table.close_row"),
    Mutant("a pin is not moved with what is published", PINS, LEASE_PY,
           "        table.tree.repin(self.node, node, PinKind.LEASE, fence)\n", ""),
    Mutant("pinning a prefix protects its last node only", PINS, TREE_PY,
           "            if step.holds > 1:\n                return\n            self.held_page_count += step.page_count\n            step = step.parent",
           "            self.held_page_count += step.page_count\n            return"),
    Mutant("the upper part of a split node is unprotected", PINS, TREE_PY,
           "        upper.holds = 1 if node.holds else 0", "        upper.holds = 0"),
    Mutant("a lease can be released twice", DOUBLE_FREE, LEASE_PY,
           "            raise LeaseError(f\"lease {self.serial} has been released\")", "            pass"),
    Mutant("a page may be named twice in one move", DOUBLE_FREE, POOL_PY,
           "        if repeated.any():", "        if False:"),
    Mutant("the owner of a page is not checked", DOUBLE_FREE, POOL_PY,
           "        if wrong.any():", "        if False:"),
    Mutant("what the tree had already is freed, and kept by the lease", DOUBLE_FREE, LEASE_PY,
           "        table.shared[self.row] = end\n        return end", "        return end"),
    # -- every transition of the lease
    Mutant("open: the row does not start with the matched pages", LEASE, LEASE_PY,
           "        self._write_path(row, node)\n        return lease", "        return lease"),
    Mutant("extend: a page too few at the edge", LEASE, LEASE_PY,
           "return (tokens + (page_size - 1)) // page_size", "return tokens // page_size"),
    Mutant("extend: what is reserved is not recorded", LEASE, LEASE_PY,
           "        self.reserved[rows] = np.maximum(self.reserved[rows], targets)", "        pass"),
    Mutant("commit: counts what was planned, not what was written", LEASE, LEASE_PY,
           "        self.committed[rows] = written\n", "        self.committed[rows] = self.reserved[rows]\n"),
    Mutant("trim: gives back the page of the last token as well", LEASE, LEASE_PY,
           "        keep = -(-to // size) * size", "        keep = to // size * size"),
    Mutant("publish: hands over what is not committed", LEASE, LEASE_PY,
           "start, usable = self.shared, min(self.committed, len(tokens))", "start, usable = self.shared, min(self.reserved, len(tokens))"),
    Mutant("release: the row is not given back", LEASE, LEASE_PY, "        table.close_row(self.row)", "        table.leases[self.row] = None"),
    Mutant("a tail is taken up by whoever has its name", WRONG_CONTENT, "memory/tails.py",
           "return tail if tail.digest == digest_of(tokens[: tail.end]) else None", "return tail"),
    Mutant("a tail that is taken up is still parked", DOUBLE_FREE, "memory/tails.py",
           "        tail = self._tails.pop(name)\n        for pool, part in zip(self._pools, tail.pages, strict=True):\n            pool.move",
           "        tail = self._tails[name]\n        for pool, part in zip(self._pools, tail.pages, strict=True):\n            pool.move"),
    Mutant("a tail is taken up while a step still writes it", FREED_IN_USE, ADMISSION_PY,
           "        if tail is not None and not memory.epochs.passed(tail.fence):\n            return _Verdict.WAITS, 0\n", ""),
    Mutant("parked sessions are never given up", STARVATION, MEMORY_PY,
           "            self.tails.give_up(needed - self._coming)\n", ""),
    # -- requests and speculation
    Mutant("retraction loses the output", LIFE, LIFECYCLE_PY,
           "        request.output = self.running.output(row)", "        request.output = request.output"),
    Mutant("a late result goes to whoever had the row", LIFE, SCHEDULER_PY,
           "live = np.flatnonzero(self.memory.leases.owner[step.rows])", "live = np.arange(len(step.rows))"),
    Mutant("a pause does not stop the submission of steps", LIFE, SCHEDULER_PY,
           "        if self.paused is not None or len(self._in_flight) >= self._depth:", "        if len(self._in_flight) >= self._depth:"),
    Mutant("a timeout is never looked at", LIFE, SCHEDULER_PY, "        self.lifecycle.expire()\n", ""),
    Mutant("pages are allocated for a request that will be finished", LIFE, RUNNING_PY,
           "return rows[(most > self.scheduled[rows]) & (most - self.unsure[rows] < self.max_length[rows])]",
           "return rows[most > self.scheduled[rows]]"),
    Mutant("rejected drafts stay reserved", SPECULATION, RUNNING_PY,
           "            self.scheduled[rows] = np.minimum(self.most[rows], self.max_length[rows]) - 1", "            pass"),
    Mutant("tokens after an end are delivered", SPECULATION, RESULTS_PY,
           "            if request.state is RequestState.ENDED:\n                continue\n", ""),
    Mutant("an end inside a verification does not cut the sequence", SPECULATION, RESULTS_PY,
           "                    running.length[rows[i]] = length[i]\n", ""),
    # -- hints, pins and tenants
    Mutant("a hint has no effect on who goes first", RETENTION, "memory/eviction.py",
           "    return node.level, node.last_used, 0", "    return 0, node.last_used, 0"),
    Mutant("a hint never fades", RETENTION, TREE_PY, "        for node in self._fading.due(now):", "        for node in ():"),
    Mutant("a hint counts beyond its budget", RETENTION, TREE_PY,
           "if self.retained_page_count + part.page_count > self._retained_limit:", "if False:"),
    Mutant("a hint reaches past the end of its range", RETENTION, TREE_PY,
           "            part = self._split(part, end) if part.end > end else part\n", ""),
    Mutant("an entry of an older hint fades the newer one", RETENTION, RETENTION_PY,
           "node.parent is not None and node.fades_at == when", "node.parent is not None"),
    Mutant("what is over goes although others share it", RETENTION, TREE_PY,
           "while step.parent is not None and max(step.holds, len(step.children)) <= 1:", "while step.parent is not None:"),
    Mutant("pins exceed their budget", PINS, PINS_PY,
           "pages = min((stop - node.start) // self._tree.page_size, left)", "pages = (stop - node.start) // self._tree.page_size"),
    Mutant("a pin that is removed is not dropped", PINS, PINS_PY,
           "            self._tree.unpin(pin.node, PinKind.OPERATOR, fence=0)\n", "            pass\n"),
    Mutant("pins are never given up", STARVATION, MEMORY_PY, "                self.pins.give_up()\n", ""),
    Mutant("the quota of a tenant is not looked at", RETENTION, "memory/eviction.py",
           "            self._over.add(salt)", "            pass"),
    Mutant("a tenant's queue is lost with its first eviction", RETENTION, "memory/eviction.py",
           "        following = self._queues[salt].peek()", "        following = None"),
    Mutant("what was learned comes before hints", RETENTION, "memory/eviction.py",
           "return node.level, self._statistics.worth(node.hits, age), node.last_used",
           "return 0, self._statistics.worth(node.hits, age), node.last_used"),
    Mutant("a prefix that comes back counts as new", RETENTION, "memory/history.py",
           "                node.hits = max(node.hits, found.hits + 1)\n", ""),
]  # fmt: skip
