"""Bugs to plant where sequences are saved, and where storage comes and goes."""

from mutant import Mutant

WRONG = "wrong KV from a deeper tier"
LOST = "pages lost between tiers"
GROWS = "something grows without end"

MUTANTS = [
    Mutant(
        "a page that takes the place of a stored one counts as stored",
        LOST,
        "memory/tiers/host.py",
        "        self._stored[pages[is_new]] = are_stored\n",
        "        self._stored[pages[is_new]] |= are_stored\n",
    ),
    Mutant(
        "a store that failed counts as done",
        LOST,
        "memory/tiers/storage.py",
        "            pages.stored[reads[whole]] = not self._is_detached\n",
        "            pages.stored[reads] = not self._is_detached\n",
    ),
    Mutant(
        "what another storage was given counts as stored here",
        LOST,
        "memory/tiers/storage.py",
        "        self._queue.clear()\n        self.forget_stored()\n",
        "        self._queue.clear()\n",
    ),
    Mutant(
        "a store that ends after it was detached counts as stored",
        LOST,
        "memory/tiers/storage.py",
        "            pages.stored[reads[whole]] = not self._is_detached\n",
        "            pages.stored[reads[whole]] = True\n",
    ),
    Mutant(
        "pages are stored again and again",
        "work for nobody",
        "memory/tiers/storage.py",
        "                if key in pages and not pages.are_stored([key])[0]:\n",
        "                if key in pages:\n",
    ),
    Mutant(
        "fetching goes on from storage that is detached",
        "work for nobody",
        "memory/tiers/storage.py",
        "is_wanted = prefetch.wanted_by > 0 and not self._is_detached",
        "is_wanted = prefetch.wanted_by > 0",
    ),
    Mutant(
        "storage that is attached gets only what comes from now on",
        LOST,
        "memory/tiers/tiers.py",
        "            self.storage.enqueue(group, keys)\n\n    def detach",
        "            pass\n\n    def detach",
    ),
    Mutant(
        "saving copies the last node only",
        LOST,
        "memory/tiers/backup.py",
        "        for part in self._tree.path(node):\n            self._wait(part)\n",
        "        self._wait(node)\n",
    ),
    Mutant(
        "saving looks at the first group only",
        LOST,
        "memory/tiers/tiers.py",
        "        for group, needed in enumerate(self._reach.needed(boundary, lacking)):\n",
        "        for group, needed in enumerate(self._reach.needed(boundary, lacking)[:1]):\n",
    ),
    Mutant(
        "what only the host has is not saved",
        LOST,
        "memory/tiers/tiers.py",
        "whole = reach.boundary(on_device, on_host)",
        "whole = reach.boundary(on_device)",
    ),
    Mutant(
        "saved means that the host has it",
        LOST,
        "memory/tiers/tiers.py",
        "return self.tokens == (self.host if self.storage is None else self.storage)",
        "return self.tokens == self.host",
    ),
    Mutant(
        "nodes that left the tree wait for a copy",
        GROWS,
        "memory/tiers/backup.py",
        "        self._waiting.pop(node.serial, None)\n",
        "        pass\n",
    ),
    Mutant(
        "any number of prefetches is under way",
        GROWS,
        "memory/tiers/storage.py",
        "        if prefetch is None and len(self._underway) >= PREFETCHES_MAX:\n            return None\n",
        "",
    ),
    Mutant(
        "pages that a slow copy pins are not waited for",
        "starvation or crash under pressure",
        "memory/room.py",
        "(self._tiers.hold_pages or bool(",
        "(bool(",
    ),
    Mutant(
        "loads do not count as use",
        "the wrong page is evicted",
        "memory/tiers/loads.py",
        "                one.loaded(read)\n",
        "                pass\n",
    ),
    Mutant(
        "a store is closed while it works",
        LOST,
        "engine/storage_io.py",
        "        self._storing.shutdown(cancel_futures=False)\n        self._store.close()\n\n    def abandon",
        "        self._storing.shutdown(wait=False, cancel_futures=True)\n        self._store.close()\n\n    def abandon",
    ),
    Mutant(
        "a cleared storage counts as full",
        LOST,
        "storage_backend.py",
        "                tiers.storage.forget_stored()\n",
        "                pass\n",
    ),
    Mutant(
        "what is given again comes a second time, live",
        "followers are led astray",
        "events/follower.py",
        "                following = number + 1\n",
        "                following = number\n",
    ),
    Mutant(
        "a follower asks for what it has",
        "followers are led astray",
        "events/follower.py",
        "numbered(first)",
        "numbered(0)",
    ),
    Mutant(
        "a backend is attached although its store can't be opened",
        "somebody waits for ever",
        "storage_backend.py",
        "            self._backend = backend\n\n        self._work",
        "            pass\n\n        self._backend = backend\n        self._work",
    ),
]
