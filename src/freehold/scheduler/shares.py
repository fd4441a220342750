"""What each client has used of the engine. Virtual token counters (Sheng et al., "Fairness in Serving Large Language
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

    `served` is a client's charge: computed tokens, output tokens counted twice. Virtual time is what each client would
    have if all had the same. A client starts at virtual time, so it cannot save up turns. A client that leaves with
    more than virtual time keeps its charge until virtual time passes it, so leaving does not reset the charge. Virtual
    time advances with every charge, so no client waits for ever behind new ones.
    """

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._free: list[int] = []
        self._served = np.zeros(1)
        self.charges = 0  # a version number of `served`
        self._time = 0.0
        self._debts: OrderedDict[str, float] = OrderedDict()
        self._left: OrderedDict[str, float] = OrderedDict()  # when each left; the newest LEFT_MAX clients

    def __len__(self) -> int:
        """Clients that have requests."""
        return len(self._accounts)

    def __contains__(self, client: str) -> bool:
        """Return whether the client has requests."""
        return client in self._accounts

    def join(self, client: str) -> int:
        """Count a new request of the client. Return the client's number."""
        account = self._accounts.get(client)
        if account is None:
            account = self._accounts[client] = _Account(self._number())
            self._served[account.number] = max(self._time, self._debts.pop(client, 0.0))
        account.requests += 1
        return account.number

    def leave(self, client: str, now: float) -> None:
        """Count a request of the client as ended."""
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
        """Return True if a client left less than MOMENT_S ago and is not back."""
        return any(now - at < MOMENT_S and client not in self._accounts for client, at in self._left.items())

    def served(self, number: int) -> float:
        return float(self._served[number])

    def ahead_of(self, number: int, others: Int64) -> Bool:
        """Return which of `others` [n] were served more than client `number`."""
        return self._served[others] > self._served[number]

    def charge(self, numbers: Int64, decodes: Bool, counts: Int64) -> None:
        """Charge clients `numbers` [n] for `counts` [n] computed tokens, or one output token where a row `decodes` [n].
        A single client is charged nothing."""
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
