"""What each client has had of the engine. Virtual token counters (Sheng et al., "Fairness in Serving Large Language
Models", OSDI 2024), with the virtual time of weighted fair queueing for clients that come back."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from freehold.contract.arrays import Bool, Int64

PROMPT_COST = 1
OUTPUT_COST = 2
DEBTS_MAX = 1024
LEFT_MAX = 4
MOMENT_S = 1.0


@dataclass
class _Account:
    number: int
    requests: int = 0


class Shares:
    """Accounts of the clients that have requests, queued or running, by client number.

    `served` is what a client was charged for: computed tokens, those of output twice. Virtual time is what everybody
    would have if all had the same. A client begins at virtual time, so that nobody saves up turns. A client that leaves
    with more than virtual time keeps that until virtual time has passed it, so that nobody sheds what it was charged.
    Virtual time advances whoever is served, so nobody waits for ever behind new clients.
    """

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._free: list[int] = []
        self._served = np.zeros(1)
        self.charges = 0  # so far: a version of all that is served
        self._time = 0.0
        self._debts: OrderedDict[str, float] = OrderedDict()
        self._left: OrderedDict[str, float] = OrderedDict()  # when; the newest LEFT_MAX clients

    def __len__(self) -> int:
        """Clients that have requests."""
        return len(self._accounts)

    def __contains__(self, client: str) -> bool:
        """Whether it has requests."""
        return client in self._accounts

    def join(self, client: str) -> int:
        """A request of this client is accepted -> the client's number."""
        account = self._accounts.get(client)
        if account is None:
            account = self._accounts[client] = _Account(self._number())
            self._served[account.number] = max(self._time, self._debts.pop(client, 0.0))
        account.requests += 1
        return account.number

    def leave(self, client: str, now: float) -> None:
        """A request of it has ended."""
        account = self._accounts[client]
        account.requests -= 1
        if account.requests:
            return
        del self._accounts[client]
        self._free.append(account.number)
        self._left[client] = now
        self._left.move_to_end(client)
        if len(self._left) > LEFT_MAX:
            self._left.popitem(last=False)
        served = float(self._served[account.number])
        if served > self._time:
            self._debts[client] = served
        if len(self._debts) > DEBTS_MAX:
            self._debts.popitem(last=False)

    def somebody_left(self, now: float) -> bool:
        """Whether a client that has no request now had one a moment ago."""
        return any(now - at < MOMENT_S and client not in self._accounts for client, at in self._left.items())

    def served(self, number: int) -> float:
        return float(self._served[number])

    def ahead_of(self, number: int, others: Int64) -> Bool:
        """Which of `others` [n] have been served more than client `number`."""
        return self._served[others] > self._served[number]

    def charge(self, numbers: Int64, decodes: Bool, counts: Int64) -> None:
        """A step computes `counts` tokens [n] for clients `numbers` [n], an output where it `decodes` [n]. Alone, a
        client is charged nothing."""
        if len(self._accounts) > 1:
            costs = np.where(decodes, OUTPUT_COST, PROMPT_COST * counts)
            self._served += np.bincount(numbers, weights=costs, minlength=len(self._served))
            self.charges += 1
            self._time += float(costs.sum()) / len(self._accounts)

    def _number(self) -> int:
        if self._free:
            return self._free.pop()
        count = len(self._accounts)
        if count == len(self._served):
            self._served = np.concatenate([self._served, np.zeros(count)])
        return count
