"""Bugs to plant in what moves pages: the ledger, the prefix tree, leases, tiers, and who may use them."""

from planted import PlantedBug

BUGS = [
    # What must never be wrong: recorded lengths, whole pages, rejected matches, drained acknowledgements, one thread.
    PlantedBug(
        "length inferred at release instead of recorded",
        "Lease.release",
        "self._free_private(self.shared, self.allocated)",
        "self._free_private(self.shared, self.committed)",
    ),
    PlantedBug(
        "what the tree owns is not cut to whole pages",
        "Lease.publish",
        "usable - usable % table.page_size",
        "-(-usable // table.page_size) * table.page_size",
    ),
    PlantedBug(
        "a match that is rejected has taken something",
        "Admission._prospect",
        "if not self._fits_beside(_1, match, _2):\n    return _3",
        "if not self._fits_beside(_1, match, _2):\n    memory.leases.open(match)\n    return _3",
    ),
    PlantedBug(
        "acknowledgements are processed only after a prefill",
        "Scheduler._take_result",
        "self.memory.complete(step.number)",
        "if (step.counts > 1).any():\n    self.memory.complete(step.number)",
    ),
    PlantedBug(
        "transfers are settled only while something is computed",
        "Memory.pass_time",
        "self.tiers is not None",
        "self.tiers is not None and self.epochs.submitted > self.epochs.completed",
    ),
    PlantedBug("limbo rows are never collected", "Memory.complete", "self.leases.collect()", "pass"),
    PlantedBug("limbo pages are never collected", "Memory.complete", "pool.collect()", "pass"),
    PlantedBug(
        "a thread of the engine frees",
        "Scheduler.step",
        "self.memory.epochs.claim_thread()",
        "self.memory.epochs.bind_thread()",
    ),
    PlantedBug(
        "outcomes are settled by the thread that reports them",
        "TransferTable.begin",
        "self.outcomes.report",
        "lambda outcome: (self.outcomes.report(outcome), self.settle_all(self.now))",
    ),
    # A page is used again while something in flight reads or writes it.
    PlantedBug("a freed page does not wait for its fence", "PagePool.free", "self.epochs.passed(fence)", "True"),
    PlantedBug("an evicted prefix does not wait for its readers", "Evictor._take", "node.fence", "0"),
    PlantedBug(
        "a row is reused while a step writes for its last tenant",
        "LeaseTable.close_row",
        "self._limbo_rows.append((int(self.fence[row]), row))",
        "self._free_rows.append(row)",
    ),
    PlantedBug("limbo is emptied one step early", "Epochs.passed", "self.completed", "self.completed + 1"),
    PlantedBug(
        "pages that a row gives back do not wait for its step",
        "LeaseTable._free",
        "pool.free(_1, _2, fence)",
        "pool.free(_1, _2, 0)",
    ),
    PlantedBug(
        "a tail is taken up while a step still writes it",
        "Admission._prospect",
        "memory.epochs.passed(tail.fence)",
        "True",
    ),
    PlantedBug(
        "a late result goes to the new tenant of a row",
        "Scheduler._take_result",
        "np.flatnonzero(self.memory.leases.owner[_1])",
        "np.arange(len(_1))",
    ),
    PlantedBug(
        "an aborted request keeps its lease",
        "Lifecycle.end",
        "request.lease is not None",
        "request.lease is not None and finish.kind is not FinishKind.ABORT",
    ),
    # Pages are freed twice, or never.
    PlantedBug("a lease can be released twice", "Lease._open_table", "raise LeaseError(_1)", "pass"),
    PlantedBug("the owner of a page is not checked", "PagePool.move", "wrong.any()", "False"),
    PlantedBug(
        "what the tree had already is freed, and kept by the lease", "Lease.publish", "_1.shared[self.row] = _2", "pass"
    ),
    PlantedBug(
        "a tail that is taken up is still parked", "TailTable.take", "del self._tails[_1], self._names[_2]", "pass"
    ),
    PlantedBug(
        "a released lease keeps its pin", "Lease.release", "table.tree.holds.unpin(_1, PinKind.LEASE, _2)", "pass"
    ),
    PlantedBug(
        "a pin is not moved with what is published",
        "Lease.publish",
        "table.tree.holds.repin(_1, _2, PinKind.LEASE, _3)",
        "pass",
    ),
    PlantedBug("a pin never expires", "PinTable.expire", "self._expiries.due(now)", "None"),
    PlantedBug(
        "the pages of one group are not released",
        "Lease._free_private",
        "zip(table.pools, self.pages(_1, _2), strict=True)",
        "zip(table.pools[:1], self.pages(_1, _2)[:1], strict=True)",
    ),
    PlantedBug(
        "rejected drafts stay reserved", "RunningTable.settle", "self.scheduled[_1] = np.minimum(_2, _3) - 1", "pass"
    ),
    PlantedBug("a closed session keeps its tail", "Scheduler.forget_session", "self.memory.tails.forget(name)", "pass"),
    PlantedBug("the audit lets a page have two holders", "Claims.take", "twice.any()", "False"),
    # A prefix is shared with a sequence that it does not belong to.
    PlantedBug(
        "the root of a namespace is shared by all tenants",
        "PrefixTree.root",
        "root = self.roots.get(namespace)",
        "namespace = Namespace()\nroot = self.roots.get(namespace)",
    ),
    PlantedBug(
        "new weights keep the prefixes of the old ones", "PrefixTree.replace_weights", "self.weights += 1", "pass"
    ),
    PlantedBug(
        "new weights leave running requests with the old KV",
        "Scheduler.updating_weights",
        "self.paused is not PauseMode.IN_PLACE",
        "False",
    ),
    PlantedBug("KV of old weights is published", "Memory.publish", "self._is_current(lease)", "True"),
    PlantedBug(
        "prefixes are found without regard to the adapter",
        "PrefixTree.namespace",
        "Namespace(salt, self.weights, adapter)",
        "Namespace(salt, self.weights)",
    ),
    PlantedBug("a split keeps the wrong pages", "PrefixTree.split", "part[page_cut:]", "part[:len(part) - page_cut]"),
    PlantedBug(
        "duplicates are freed but the row still names them",
        "Lease._replace",
        "table.page_tables.write(_1, self.row, _2, _3)",
        "pass",
    ),
    PlantedBug("an evicted page is still named by its node", "BoundedPages._take", "pages[columns] = 0", "pass"),
    PlantedBug(
        "a window is one token short",
        "CacheGroup.first_column",
        "boundary - self.lookback",
        "boundary - self.lookback + 1",
    ),
    PlantedBug(
        "a tail has a state that is ahead",
        "Lease.park",
        "self.reserved <= end or not any((group.is_state for group in table.groups))",
        "True",
    ),
    PlantedBug(
        "a page's key forgets the pages before it",
        "chain",
        "digest + raw[start:start + 4 * page_size]",
        "before + raw[start:start + 4 * page_size]",
    ),
    PlantedBug("a key forgets the KV's format", "_identity", "config.kv_cache_dtype", "None"),
    # Pages are lost or mixed up between device, host and storage.
    PlantedBug(
        "a failed copy settles as done",
        "Backup._arrive",
        "pages.settle(_1, _2, whole, _3)",
        "pages.settle(_1, _2, np.ones_like(whole), _3)",
    ),
    PlantedBug("what was not stored is forgotten", "Storage._stored", "self._owes_more = True", "pass"),
    PlantedBug("the end of a prefix outlives its beginning", "Backup._begin_rescue", "parts[::-1]", "parts"),
    PlantedBug(
        "the host keeps what the device has",
        "HostPages._in_turn",
        "yield from self._alone.items()",
        "yield from list(self._alone.items())[::-1]",
    ),
    PlantedBug(
        "the source of a copy is not pinned",
        "Hold.on",
        "tree.holds.add(node, kind)",
        "node = tree.root(node.namespace)\ntree.holds.add(node, kind)",
    ),
    PlantedBug("a load evicts its own source", "HostPages._evict", "self._readers[page] == 0", "True"),
    PlantedBug(
        "KV of weights that are gone comes into the tree",
        "Loads._finish",
        "is_whole and namespace.weights == tree.weights",
        "is_whole",
    ),
    PlantedBug(
        "a copy of what was computed meanwhile is not freed",
        "Loads._finish",
        "mine[pool.owner[mine] == transfer.owner]",
        "mine[:0]",
    ),
    PlantedBug(
        "host pages of a late copy are given away while they may be written",
        "Backup._abandon",
        "self._give_back(transfer)",
        "self._discard(transfer, Outcome(0, []))\nself._give_back(transfer)",
    ),
    PlantedBug("an entry of another key is served", "decode", "header.key != key", "False"),
]
