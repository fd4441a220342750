"""A follower of cache events: it must know exactly what is cached."""

from __future__ import annotations

import numpy as np

from freehold.contract.prefix_keys import chain
from freehold.memory import Memory
from freehold.memory.events import CacheEvent, Cleared, EventLog, Medium, Removed, Stored


class WrongMirror(AssertionError):
    """The events of an engine misled its follower."""


class Mirror:
    """Follows the first cache group. `keys` of cached pages by medium."""

    def __init__(self, log: EventLog, page_size: int):
        self._log = log
        self._page_size = page_size
        self.keys: dict[Medium, set[bytes]] = {medium: set() for medium in Medium}

    def follow(self) -> None:
        """Apply new events. Raise WrongMirror for an event that can't be true."""
        for event in self._log.take():
            self._apply(event)

    def _apply(self, event: CacheEvent) -> None:
        if isinstance(event, Cleared):
            for keys in self.keys.values():
                keys.clear()
            return
        known = self.keys[event.medium]
        if isinstance(event, Stored):
            if known & set(event.keys):
                raise WrongMirror(f"pages are stored a second time on {event.medium}")
            self._check_tokens(event)
            known.update(event.keys)
        else:
            assert isinstance(event, Removed)
            if not known >= set(event.keys):
                raise WrongMirror(f"pages are removed from {event.medium} that were not there")
            known.difference_update(event.keys)

    def _check_tokens(self, event: Stored) -> None:
        """Check that the keys match the tokens behind the parent."""
        if len(event.tokens) != len(event.keys) * self._page_size:
            raise WrongMirror("an event lacks the tokens of its pages")
        if event.parent is not None and chain(event.parent, event.tokens, self._page_size) != list(event.keys):
            raise WrongMirror("the keys of an event are not those of its tokens")

    def check(self, memory: Memory) -> None:
        """Raise WrongMirror unless it knows exactly what is cached."""
        device = {
            key
            for node in memory.tree.nodes()
            if node.parent is not None and node.namespace.weights == memory.tree.weights
            for key in node.keys_at(np.flatnonzero(node.pages[0]))
        }
        host = set() if memory.tiers is None else {key for key, _ in memory.tiers.host.pages[0].entries()}
        for medium, keys in ((Medium.DEVICE, device), (Medium.HOST, host)):
            if medium is Medium.HOST and memory.tree.weights:
                keys &= self.keys[medium]  # copies of old weights' pages being stored stay a little longer
            if self.keys[medium] != keys:
                more, less = len(self.keys[medium] - keys), len(keys - self.keys[medium])
                raise WrongMirror(f"a follower believes in {more} pages on {medium} that are gone, and lacks {less}")
