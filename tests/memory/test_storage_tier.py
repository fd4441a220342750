"""Storage behind the host: what is fetched for requests that wait, and what is never found."""

from collections import deque

import pytest
from tier_bench import FULL, SIZE, TOKENS, WINDOW, Bench

from freehold.contract.orders import Kind, Order
from freehold.contract.slices import finished
from freehold.memory import CacheGroup, PrefetchPolicy, WritePolicy
from freehold.memory.tiers.transfer import LATE_S


def stored(**options) -> Bench:
    """A bench whose storage has the prompt, and whose device and host have nothing."""
    bench = Bench(storage=PrefetchPolicy.WAIT_COMPLETE, **options)
    bench.compute()
    bench.settle()
    return bench


def again(bench: Bench, *groups, **options) -> Bench:
    """After a restart."""
    return Bench(*groups, storage=PrefetchPolicy.WAIT_COMPLETE, mover=bench.mover, **options)


def prefetch(bench: Bench, tokens=TOKENS, salt=""):
    namespace = bench.memory.match(salt, tokens).namespace
    return finished(
        bench.tiers.storage.prefetching(namespace, bench.tiers.keys(namespace, tokens), len(tokens), bench.now)
    )


def test_storage_outlives_the_process():
    bench = again(stored())
    assert bench.plan() is None
    fetched = prefetch(bench)
    assert not fetched.is_over
    bench.settle()
    assert fetched.is_over
    assert (fetched.was_there, fetched.boundary) == (0, 32)
    assert bench.load() == len(TOKENS)
    assert prefetch(bench) is None


@pytest.mark.parametrize("most", [3, 4, 8])
def test_a_long_prefix_is_asked_for_and_fetched_in_parts(most, monkeypatch):
    for name in ("PROBED_COLUMNS", "FETCHED_PAGES", "STORED_PAGES"):
        monkeypatch.setattr(f"freehold.memory.tiers.storage.{name}", most)
    bench = again(stored())
    assert prefetch(bench).probed == 0
    assert len(bench.mover.orders[0][0].keys[0]) == most
    bench.settle()
    assert bench.load() == len(TOKENS)


@pytest.mark.parametrize("policy", [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK])
@pytest.mark.parametrize("fails", [False, True])
def test_to_be_stored_is_not_to_be_used(policy, fails, monkeypatch):
    """A prefix that is stored in pieces, and stored late: the host forgets its end before its beginning, and prefixes
    in the order of their use."""
    monkeypatch.setattr("freehold.memory.tiers.storage.STORED_PAGES", 3)
    bench = Bench(policy=policy, storage=PrefetchPolicy.WAIT_COMPLETE)
    newer = TOKENS + 100
    for tokens in (newer, TOKENS, newer):
        bench.compute(tokens)
        while any(order.kind is not Kind.STORE for order, _ in bench.mover.orders):
            bench.mover.end(next(order for order, _ in bench.mover.orders if order.kind is not Kind.STORE))
            bench.turn()
    bench.evict_all()
    bench.turn()
    for _ in range(20):
        for order, _ in [*bench.mover.orders]:
            storing = order.kind is Kind.STORE and fails
            bench.mover.end(order, [[False] * len(order.keys[0])] if storing else None)
        bench.turn()
    bench.turn(100)
    bench.settle()
    pages = bench.tiers.host.pages[0]
    names = {}
    for tokens in (TOKENS, newer):
        keys = bench.tiers.keys(bench.memory.match("", tokens).namespace, tokens)
        names |= {keys[column]: (int(tokens[0]), column) for column in range(8)}
    assert len(bench.mover.stored) == len(pages) == 16
    in_turn = [names[key] for key, _ in pages._in_turn()]
    assert in_turn == [(first, column) for first in (1, 101) for column in range(8)[::-1]]


@pytest.mark.parametrize(("most", "pages"), [(3, 3), (0, 1)])
def test_no_order_has_more_bytes_than_a_slow_store_moves_in_time(most, pages, monkeypatch):
    """Unless a single page has."""
    first = Bench(storage=PrefetchPolicy.WAIT_COMPLETE)
    page_bytes = first.tiers.plan.page_bytes[0]
    monkeypatch.setattr("freehold.memory.tiers.storage.ORDER_BYTES", most * page_bytes + page_bytes // 2)
    first = stored()
    bench = again(first)
    prefetch(bench)
    bench.mover.end()  # the question
    bench.turn()
    assert {len(order.keys[0]) for order, _ in bench.mover.orders} <= {pages, 8 % pages}
    bench.settle()
    assert bench.load() == len(TOKENS)


def test_only_what_is_needed_is_fetched():
    first = Bench(FULL, WINDOW, storage=PrefetchPolicy.WAIT_COMPLETE)
    first.compute()
    first.settle()
    bench = again(first, FULL, WINDOW)
    prefetch(bench)
    bench.settle()
    assert [len(pages) for pages in bench.tiers.host.pages] == [8, 2]
    assert bench.load() == len(TOKENS)


def test_what_storage_has_lost_ends_the_prefix(monkeypatch):
    """Behind it nothing is asked for."""
    monkeypatch.setattr("freehold.memory.tiers.storage.PROBED_COLUMNS", 3)
    first = stored()
    namespace = first.memory.match("", TOKENS).namespace
    names = first.tiers.storage._names([[first.tiers.keys(namespace, TOKENS)[5]]])
    del first.mover.stored[names[0][0]]
    bench = again(first)
    fetched = prefetch(bench)
    bench.settle()
    assert (fetched.probed, fetched.boundary) == (5, 5 * SIZE)
    assert bench.load() == 5 * SIZE


def test_what_is_damaged_between_question_and_answer_is_not_found():
    bench = again(stored())
    prefetch(bench)
    bench.mover.end()  # the question
    bench.turn()
    bench.mover.end(whole=[[True, True, True, False, True, True, True, True]])
    bench.turn()
    assert len(bench.tiers.host.pages[0]) == 7
    assert bench.host_free == [57]
    assert bench.load() == 3 * SIZE


@pytest.mark.parametrize("end", ["all", "unwanted", "detached", "late"])
def test_what_waits_to_be_fetched_owns_no_pages(end, monkeypatch):
    monkeypatch.setattr("freehold.memory.tiers.storage.FETCHED_PAGES", 1)
    monkeypatch.setattr("freehold.memory.tiers.storage.FETCHES_IN_FLIGHT", 2)
    bench = again(stored())
    fetched = prefetch(bench)
    bench.mover.end()  # the question
    bench.turn()
    for arrived in range(4):
        assert len(bench.mover.orders) == 2
        assert bench.host_free == [64 - 2 - arrived]
        bench.mover.end()
        bench.turn()
    if end == "unwanted":
        fetched.wanted_by -= 1
    elif end == "detached":
        bench.tiers.detach()
    elif end == "late":  # those two hold up nobody
        late = [order for order, _ in bench.mover.orders]
        bench.turn(LATE_S[Kind.FETCH] + 1)
        assert [order for order, _ in bench.mover.orders][:2] == late
        assert len(bench.mover.orders) == 4
    bench.settle()
    assert fetched.is_over
    assert not bench.tiers.transfers
    assert len(bench.tiers.host.pages[0]) == (8 if end in ("all", "late") else 6)


def test_nothing_more_is_fetched_for_a_request_that_has_ended():
    bench = again(stored())
    fetched = prefetch(bench)
    fetched.wanted_by -= 1
    bench.mover.end()
    bench.turn()
    assert not bench.mover.orders
    assert fetched.is_over
    assert bench.host_free == [64]


def test_pages_of_a_fetch_are_its_own_until_it_has_ended():
    bench = again(stored())
    fetched = prefetch(bench)
    bench.mover.end()
    bench.turn()
    fetched.wanted_by -= 1
    bench.turn(LATE_S[Kind.FETCH] + 1)
    assert bench.host_free == [56]
    bench.memory.flush()
    assert bench.host_free == [56]
    bench.settle()
    assert bench.load() == len(TOKENS), "it is found by the next one that asks"


def test_a_prefetch_is_late_when_its_newest_order_is():
    bench = again(stored())
    fetched = prefetch(bench)
    bench.turn(LATE_S[Kind.PROBE] - 1)
    assert bench.tiers.storage.is_coming(fetched)
    bench.mover.end()  # the question
    bench.turn(0.0)
    bench.turn(LATE_S[Kind.FETCH])
    assert bench.tiers.storage.is_coming(fetched)
    bench.turn(0.01)
    assert not bench.tiers.storage.is_coming(fetched)
    bench.settle()
    assert not bench.tiers.storage.is_coming(fetched)


def test_two_requests_share_a_fetch():
    bench = again(stored())
    one, two = prefetch(bench), prefetch(bench)
    assert one is two
    assert one.wanted_by == 2
    assert len(bench.mover.orders) == 1


@pytest.mark.parametrize("other", [{"identity": b"two"}, {"salt": "tenant"}, {"weights": b"w"}, {"group": "window"}])
def test_another_field_of_a_key_finds_nothing(other):
    first = stored()
    group = CacheGroup(other.get("group", "full"))
    bench = again(first, group, identity=other.get("identity", b"one"))
    if "weights" in other:
        bench.memory.replace_weights(other["weights"])
    fetched = prefetch(bench, salt=other.get("salt", ""))
    bench.settle()
    assert fetched.boundary == 0
    assert not len(bench.tiers.host.pages[0])


def test_pages_that_are_being_stored_stay_on_the_host():
    bench = Bench(host=8, storage=PrefetchPolicy.TIMEOUT)
    bench.compute()
    bench.turn()
    bench.mover.end()
    bench.turn()
    assert bench.mover.orders[0][0].kind is Kind.STORE
    bench.evict_all()
    deque(bench.tiers.host.clearing(), maxlen=0)
    assert len(bench.tiers.host.pages[0]) == 8
    bench.mover.end()
    bench.turn()
    deque(bench.tiers.host.clearing(), maxlen=0)
    assert len(bench.tiers.host.pages[0]) == 0


def test_what_came_from_storage_is_not_stored_again():
    bench = again(stored())
    prefetch(bench)
    bench.settle()
    assert bench.load() == len(TOKENS)
    bench.settle()
    assert bench.tiers.storage.stored == 0


@pytest.mark.parametrize(
    ("kind", "seconds"), [(Kind.BACKUP, 2), (Kind.LOAD, 2), (Kind.STORE, 10), (Kind.FETCH, 10), (Kind.PROBE, 10)]
)
def test_a_transfer_is_counted_on_for_so_many_seconds(kind, seconds):
    transfers = Bench().tiers.transfers
    transfers.settle_all(7)
    transfers.begin(Order(1, kind, []), lambda *_: None)
    for now, is_awaited in ((7 + seconds, True), (7.01 + seconds, False)):
        transfers.settle_all(now)
        assert transfers.is_awaited(1) == transfers.are_awaited == is_awaited
