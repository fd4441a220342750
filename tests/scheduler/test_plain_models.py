"""Parts of the scheduler beside plain models of what they promise: whatever happens, both say the same."""

import math
from collections import Counter, defaultdict
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freehold.contract.sampling_params import SamplingParams
from freehold.contract.step import DraftCost
from freehold.scheduler.admission import GrowthEstimate
from freehold.scheduler.chunk_budget import ChunkBudget, PromptBudget
from freehold.scheduler.queue import RANKED_MAX, WaitingQueue
from freehold.scheduler.request import Request
from freehold.scheduler.shares import Shares
from freehold.scheduler.speculation import DraftBudget
from freehold.scheduler.step_time import StepTime

CLIENTS = "abcd"

# -- clients --------------------------------------------------------------------------------------------------


class Accounts:
    """What clients had, exactly. A client that comes back has at least the virtual time."""

    def __init__(self):
        self.requests, self.served, self.left = Counter(), {}, {}
        self.time = Fraction(0)

    def join(self, client):
        if not self.requests[client]:
            self.served[client] = max(self.time, self.served.get(client, 0))
        self.requests[client] += 1

    def leave(self, client, now):
        self.requests[client] -= 1
        if not self.requests[client]:
            self.left[client] = now

    def charge(self, costs):
        here = [client for client in CLIENTS if self.requests[client]]
        if len(here) > 1:
            for client, cost in costs:
                self.served[client] += cost
                self.time += Fraction(cost, len(here))


@settings(max_examples=60)
@given(st.data())
def test_clients_are_charged_what_they_had(data):
    shares, model, now, numbers = Shares(), Accounts(), 0.0, {}
    for _ in range(data.draw(st.integers(1, 40))):
        client, now = data.draw(st.sampled_from(CLIENTS)), now + data.draw(st.sampled_from([0.0, 0.25, 0.5]))
        here = [one for one in CLIENTS if model.requests[one]]
        verb = data.draw(st.sampled_from(["join", "leave", "charge", "charge"]))
        if verb == "join":
            numbers[client] = shares.join(client)
            model.join(client)
        elif verb == "leave" and client in here:
            shares.leave(client, now)
            model.leave(client, now)
        elif verb == "charge" and here:
            rows = data.draw(st.lists(st.tuples(st.sampled_from(here), st.booleans(), st.integers(1, 60)), max_size=5))
            of, decodes, counts = ([row[i] for row in rows] for i in range(3))
            shares.charge(
                np.array([numbers[one] for one in of], np.int64), np.array(decodes, bool), np.array(counts, np.int64)
            )
            model.charge([(one, 2 if is_output else count) for one, is_output, count in rows])
        here = [one for one in CLIENTS if model.requests[one]]
        assert [one for one in CLIENTS if one in shares] == here
        assert len(shares) == len(here)
        assert sorted({numbers[one] for one in here}) == sorted(numbers[one] for one in here), "two have one account"
        for one in here:
            assert shares.served(numbers[one]) == pytest.approx(float(model.served[one]))
        order = sorted(here, key=lambda one: shares.served(numbers[one]))
        assert not order or not shares.ahead_of(numbers[order[-1]], np.array([numbers[one] for one in order])).any()
        gone = [at for one, at in model.left.items() if one not in here]
        assert shares.somebody_left(now) == any(now - at < 1.0 for at in gone)


# -- the line -------------------------------------------------------------------------------------------------


class Lines:
    """The waiting requests, sorted for each question."""

    def __init__(self, policy, most, served):
        self.policy, self.most, self.served = policy, most, served
        self.lines = defaultdict(list)  # by class and client: requests, in the order in which they entered
        self.entered, self.left = Counter(), Counter()  # by line
        self.number, self.matched = {}, {}  # by request
        self.ranked = {}  # by request: the version at which it was looked up

    def line(self, request):
        return (-request.priority if self.policy == "priority" else 0), request.client_number

    def push(self, request):
        key = self.line(request)
        self.entered[key] += 1
        self.number[request], self.matched[request] = self.entered[key], 0
        self.ranked.pop(request, None)
        self.lines[key].append(request)

    def remove(self, request):
        level, client = self.line(request)
        self.lines[level, client].remove(request)
        self.left[level, client] += 1
        for key in self.lines:
            if key[1] == client and key[0] < level:
                self.entered[key] += 1
                self.left[key] += 1
        if not self.lines[level, client]:
            for known in (self.lines, self.entered, self.left):
                del known[level, client]

    def is_due(self, request):
        return self.left[self.line(request)] - self.number[request] >= self.most

    def rank(self, version, length):
        for line in self.lines.values() if self.policy == "lpm" else ():
            for request in line:
                if not self.is_due(request) and self.ranked.get(request) != version:
                    self.ranked[request], self.matched[request] = version, length(request)

    def key(self, request):
        if self.policy == "lpm" and self.is_due(request):
            return 0, self.number[request], 0
        return 1, -self.matched[request], request.order

    def in_turn(self):
        found = []
        for level in sorted({level for level, _ in self.lines}):
            clients = sorted((key[1] for key in self.lines if key[0] == level), key=lambda one: (self.served(one), one))
            lines = [sorted(self.lines[level, client], key=self.key) for client in clients]
            for at in range(max(map(len, lines))):
                found += [line[at] for line in lines if at < len(line)]
        return found


@settings(max_examples=100)
@given(policy=st.sampled_from(["fcfs", "lpm", "priority"]), most=st.integers(1, 3), data=st.data())
def test_the_line_is_what_sorting_it_anew_gives(policy, most, data):
    shares = Shares()
    numbers = [shares.join(client) for client in CLIENTS[:3]]
    queue, model = WaitingQueue(policy, most, shares), Lines(policy, most, shares.served)
    waiting, gone = [], []
    for order in range(1, data.draw(st.integers(5, 50))):
        verb = data.draw(st.sampled_from(["push", "push", "back", "remove", "remove", "head", "charge", "rank"]))
        request = None
        if verb == "push":
            priority, client = data.draw(st.integers(-1, 1)), data.draw(st.sampled_from(numbers))
            request = Request(f"r{order}", np.array([1], np.int32), SamplingParams(), priority=priority, order=order)
            request.client_number = client
        elif verb == "back" and gone:  # it was retracted, and keeps its arrival
            request = gone.pop(data.draw(st.integers(0, len(gone) - 1)))
        elif verb in ("remove", "head") and waiting:
            leaving = queue.peek() if verb == "head" else data.draw(st.sampled_from(waiting))
            waiting.remove(leaving)
            gone.append(leaving)
            queue.remove(leaving)
            model.remove(leaving)
        elif verb == "charge":
            shares.charge(np.array([data.draw(st.sampled_from(numbers))]), np.array([False]), np.array([3]))
        elif verb == "rank":
            version, shift = order // 4, data.draw(st.integers(0, 5))
            for ranked in (queue, model):
                ranked.rank(version, lambda one, shift=shift: (one.order * 7 + shift) % 5)
        if request is not None and len(waiting) < RANKED_MAX:
            waiting.append(request)
            queue.push(request)
            model.push(request)
        assert list(queue.in_turn()) == model.in_turn()
        assert [queue.is_due(one) for one in waiting] == [model.is_due(one) for one in waiting]
        assert queue.peek() is next(iter(model.in_turn()), None)
        assert (len(queue), queue.clients()) == (len(waiting), {one.client_number for one in waiting})


@given(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.sets(st.integers(0, 11)))
def test_a_request_that_leaves_while_the_line_is_walked_changes_no_turn(clients, leaving):
    shares = Shares()
    numbers, queue = [shares.join(client) for client in CLIENTS[:3]], WaitingQueue(shares=shares)
    for order, client in enumerate(clients):
        request = Request(f"r{order}", np.array([1], np.int32), SamplingParams(), order=order)
        request.client_number = numbers[client]
        queue.push(request)
    whole, met = list(queue.in_turn()), []
    for request in queue.in_turn():
        met.append(request)
        if request.order in leaving:
            queue.remove(request)
    assert met == whole
    assert sorted(one.order for one in queue.in_turn()) == sorted({one.order for one in whole} - leaving)


# -- what steps take ------------------------------------------------------------------------------------------


def decode(points: dict[int, float], rows: int) -> float:
    """A line through what was seen, where no number of rows counts for more than a larger one."""
    known = sorted(points)
    lowest = [min(points[more] for more in known if more >= rows) for rows in known]
    if rows == 0 or not known:
        return 0.0
    if rows > known[-1]:
        return points[known[-1]] * rows / known[-1]
    return float(np.interp(rows, known, lowest))


SECONDS = st.floats(0.001, 0.1)


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from([0, 0, 1, 30]), SECONDS), max_size=25), SECONDS)
def test_step_times_are_averages_of_what_was_seen(steps, more):
    time, points, token, newest = StepTime(), {}, 0.0, 0.0
    for rows, tokens, seconds in steps:
        rows = rows or (0 if tokens else 1)
        time.learn(rows, tokens, seconds)
        if tokens:
            each = max(seconds - decode(points, rows), 0.0) / tokens
            token = 0.8 * token + 0.2 * each if token else each
        else:
            newest = 0.8 * newest + 0.2 * seconds if newest else seconds
            old = points.get(rows, seconds)
            weight = 0.003 if seconds > old else 0.2
            points[rows] = (1 - weight) * old + weight * seconds
        assert time.token == pytest.approx(token)
        assert time.newest_decode == pytest.approx(newest)
        assert time.is_known == bool(points)
        for count in range(13):
            assert time.decode(count) == pytest.approx(decode(points, count))
    if points:
        limit = time.decode(1) + more
        joined = next(joined for joined in range(10_000) if time.decode(joined + 2) > limit)
        assert time.rows_within(more) == joined


# -- budgets --------------------------------------------------------------------------------------------------


@given(
    limit=st.integers(1, 600), target=st.none() | st.floats(0.001, 0.5), token=st.sampled_from([0.0, 1e-4, 1e-3, 0.05]),
    newest=st.sampled_from([0.0, 0.004, 0.2]), rows=st.integers(0, 3),
)  # fmt: skip
def test_prompts_have_the_tokens_that_their_time_allows(limit, target, token, newest, rows):
    time = StepTime()
    time.token, time.newest_decode = token, newest
    chunks = ChunkBudget(limit, target, time)

    def within(seconds: float, least: int) -> int:
        return limit if token == 0 else min(limit, max(least, int(seconds / token)))

    assert chunks.together() == within(0.1, 32)
    if target is None or rows == 0:
        assert chunks.tokens(rows) == within(0.25, 128)
    elif token == 0:
        assert chunks.tokens(rows) == min(64, limit)
    else:
        assert chunks.tokens(rows) == within(target - newest, 16)


@given(
    st.integers(0, 40),
    st.none() | st.dictionaries(st.integers(0, 2), st.integers(0, 30)),
    st.none() | st.integers(1, 60),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30), st.booleans()), max_size=8),
)  # fmt: skip
def test_no_client_gets_more_of_a_step_than_its_share(tokens, shares, together, asked):
    given_to, total = Counter(), 0
    together_max = tokens if together is None else min(together, tokens)
    budget = PromptBudget(tokens, None if shares is None else dict(shares), together)
    for client, wanted, takes in asked:
        offer = budget.offer(client, wanted)
        share = (shares or {}).get(client, tokens)
        left = min(tokens - total, share - given_to[client])
        assert budget.is_spent == (total >= together_max)
        if total >= together_max:
            assert offer == 0
        elif min(wanted, left) <= together_max:
            assert offer == min(wanted, left), "what fits is not cut"
        else:
            assert offer == together_max - total
        if takes:
            budget.spend(client, offer)
            given_to[client] += offer
            total += offer


@given(st.lists(st.booleans(), max_size=30), st.sampled_from([0.05, 0.3, 0.9]))
def test_the_estimate_of_growth_rises_when_memory_runs_out_and_falls_slowly(steps, share):
    growth = GrowthEstimate()
    assert growth.share == 0.3
    growth.share = share
    for ran_out in steps:
        if ran_out:
            growth.ran_out()
            share = min(share + 0.25, 1.0)
        else:
            growth.went_well()
            share = max(share * 0.998, 0.05)
        assert growth.share == pytest.approx(share)


class Experience:
    """Of one row: drafts that were right, and drafts that were tried. Nine tenths of it survive a step."""

    def __init__(self):
        self.right, self.tried = 2.0, 4.0

    def learn(self, proposed: int, accepted: int) -> None:
        self.right = 0.9 * self.right + 0.1 * 2.0 + accepted
        self.tried = 0.9 * self.tried + 0.1 * 4.0 + accepted + (accepted < proposed)

    def most(self, limit: int, bar: float) -> int:
        """The most drafts of which the last is right often enough."""
        rate = min(max(self.right / self.tried, 1e-3), 0.999)
        return max(count for count in range(limit + 1) if count == 0 or rate**count >= bar * (1 - 1e-12))


@settings(max_examples=100)
@given(
    st.builds(
        DraftCost, st.integers(0, 8), st.sampled_from([0.5, 3.0, 20.0]), st.sampled_from([0.0, 0.1, 0.6]),
        forced=st.integers(0, 6),
    ),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6), st.floats(0, 1), st.booleans()), max_size=20),
    st.integers(1, 40),
)  # fmt: skip
def test_drafts_are_as_many_as_pay(cost, events, tokens):
    budget, rows = DraftBudget(cost, 3), [Experience() for _ in range(3)]
    forced = [0, 0, 0]
    for row in range(3):
        budget.start(row, False)
    for row, proposed, share, starts in events:
        if starts:
            budget.start(row, share > 0.5)
            rows[row], forced[row] = Experience(), cost.forced if share > 0.5 else 0
        else:
            accepted = math.floor(share * proposed)
            budget.learn(np.array([row]), np.array([proposed]), np.array([accepted]))
            rows[row].learn(proposed, accepted)
    for some in ([0, 1, 2], [2, 0], [1]):
        bar = tokens / (tokens + cost.overhead_tokens)
        expected = [rows[row].most(forced[row], bar) for row in some]
        if bar + cost.proposal < 1:
            more = (rows[row].most(cost.limit, bar + cost.proposal) for row in some)
            expected = list(map(max, expected, more))
        assert budget.choose(np.array(some), tokens).tolist() == expected
        assert budget.may_draft(np.array(some)) == bool(cost.limit or any(forced[row] for row in some))
