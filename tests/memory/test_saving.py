"""Sequences that are saved whatever the write policy is, and storage that comes and goes."""

import numpy as np
import pytest
from tier_bench import FULL, SIZE, STATE, TOKENS, WINDOW, Bench

from freehold.contract.orders import Kind
from freehold.contract.slices import finished
from freehold.memory import PrefetchPolicy, Saved, WritePolicy
from freehold.memory.tiers.backoff import RETRY_MAX_S
from freehold.memory.tiers.backup import ASKED_RETRY_MAX_S

WAIT = PrefetchPolicy.WAIT_COMPLETE
LAZY = [WritePolicy.WRITE_BACK, WritePolicy.SELECTIVE]


def namespace(bench):
    return bench.memory.match("", TOKENS).namespace


def save(bench, tokens=TOKENS) -> Saved:
    return finished(bench.tiers.saving(namespace(bench), tokens).looking())


def settled(bench, asking):
    """Its slices, between which all orders end."""
    while True:
        try:
            yield next(asking)
        except StopIteration as answered:
            return answered.value
        bench.settle()


def prefetch(bench):
    keys = bench.tiers.keys(namespace(bench), TOKENS)
    return finished(bench.tiers.storage.prefetching(namespace(bench), keys, len(TOKENS), bench.now))


@pytest.mark.parametrize("policy", LAZY)
@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW), (FULL, STATE)], ids=["full", "window", "state"])
def test_a_sequence_goes_to_storage_although_the_policy_would_wait(policy, groups):
    bench = Bench(*groups, policy=policy, storage=WAIT)
    bench.compute()
    bench.settle()
    assert not bench.mover.stored
    assert save(bench) == Saved(len(TOKENS), 0, 0)
    bench.turn()
    bench.mover.end()
    assert save(bench).host == 0, "it counts when it has been settled"
    bench.settle()
    saved = save(bench)
    assert saved == Saved(len(TOKENS), len(TOKENS), len(TOKENS))
    assert saved.is_whole
    bench.settle()
    again = Bench(*groups, policy=policy, storage=WAIT, mover=bench.mover)
    prefetch(again)
    again.settle()
    assert again.load() == len(TOKENS)


def test_without_storage_the_host_is_the_deepest_tier():
    bench = Bench(policy=WritePolicy.WRITE_BACK)
    bench.compute()
    assert not save(bench).is_whole
    bench.settle()
    assert save(bench) == Saved(len(TOKENS), len(TOKENS), None)
    assert save(bench).is_whole


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW), (FULL, STATE)], ids=["full", "window", "state"])
def test_what_only_the_host_has_is_saved_too(groups):
    bench = Bench(*groups)
    bench.compute()
    bench.settle()
    bench.evict_all()
    bench.tiers.attach(WAIT)
    bench.tiers.storage._there = iter(())  # as if there had been too many
    assert save(bench) == Saved(len(TOKENS), len(TOKENS), 0)
    assert not save(bench).is_whole
    bench.settle()
    assert save(bench).is_whole


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW), (FULL, STATE)], ids=["full", "window", "state"])
@pytest.mark.parametrize("is_on_host", [True, False])
def test_what_storage_has_lost_is_asked_for_and_stored_again(groups, is_on_host):
    bench = Bench(*groups, policy=WritePolicy.WRITE_BACK, storage=WAIT)
    bench.compute()
    save(bench)
    bench.settle()
    if not is_on_host:
        finished(bench.tiers.host.clearing())

    def asked():
        saving = bench.tiers.saving(namespace(bench), TOKENS)
        assert finished(saving.looking()).is_whole
        return finished(settled(bench, saving.asking()))

    assert asked()
    lost = bench.mover.stored.popitem()
    assert not asked()
    while not save(bench).is_whole:
        bench.settle()
    assert asked()
    assert lost[0] in bench.mover.stored


def test_a_branch_is_saved_from_its_beginning():
    bench = Bench(policy=WritePolicy.WRITE_BACK, storage=WAIT)
    bench.compute()
    bench.compute(np.concatenate([TOKENS[:16], TOKENS[16:] + 50]))
    assert len([node for node in bench.memory.tree.nodes() if node.parent is not None]) == 3
    save(bench)
    bench.settle()
    assert save(bench).is_whole
    assert len(bench.mover.stored) == len(TOKENS) // SIZE, "the other branch is not saved"


def test_what_is_saved_already_is_not_copied_again():
    bench = Bench(storage=WAIT)
    bench.compute()
    bench.settle()
    written = dict(bench.mover.stored)
    assert save(bench).is_whole
    bench.turn()
    assert not bench.mover.orders
    bench.tiers.storage.enqueue(0, [key for key, _ in bench.tiers.host.pages[0].entries()])
    bench.turn()
    assert not bench.mover.orders
    assert bench.mover.stored == written


def test_a_page_that_takes_the_place_of_a_stored_one_is_stored():
    bench = Bench(host=8, storage=WAIT)
    bench.compute()
    bench.settle()
    bench.evict_all()
    other = TOKENS + 100
    bench.compute(other)
    bench.settle()
    assert len(bench.mover.stored) == 2 * len(TOKENS) // SIZE
    assert save(bench, other).storage == len(TOKENS)


def test_a_copy_that_failed_does_not_count_as_stored():
    bench = Bench(storage=WAIT)
    bench.compute()
    bench.turn()
    bench.mover.end()
    bench.turn()
    bench.mover.end(whole=[[True, True, True, False, True, True, True, True]])
    bench.turn()
    assert save(bench) == Saved(len(TOKENS), len(TOKENS), 3 * SIZE)
    bench.settle()
    assert save(bench).is_whole


def test_another_storage_gets_what_the_first_had():
    bench = Bench(storage=WAIT)
    bench.compute()
    bench.settle()
    bench.tiers.detach()
    assert not bench.tiers.host.pages[0].given.stored.any()
    bench.mover.stored.clear()
    bench.tiers.attach(WAIT)
    bench.settle()
    assert len(bench.mover.stored) == len(TOKENS) // SIZE


def test_storage_that_is_attached_gets_what_the_host_has():
    bench = Bench()
    bench.compute()
    bench.settle()
    bench.tiers.attach(WAIT)
    bench.settle()
    assert len(bench.mover.stored) == len(TOKENS) // SIZE


def test_storage_that_is_attached_gets_all_however_much_that_is(monkeypatch):
    monkeypatch.setattr("freehold.memory.tiers.storage.QUEUE_MAX", 4)
    monkeypatch.setattr("freehold.memory.tiers.storage.STORED_PAGES", 2)
    bench = Bench()
    bench.compute()
    bench.settle()
    bench.tiers.attach(WAIT)
    assert not bench.tiers.storage._queue, "all at once would take long"
    bench.tiers.host.pages[0].given.has(np.arange(1, 5))  # as if others had asked for them
    while bench.tiers.has_work:
        bench.turn()
    assert bench.mover.orders
    bench.settle()
    assert len(bench.mover.stored) == len(TOKENS) // SIZE - 4
    assert bench.tiers.storage.dropped == 0


@pytest.mark.parametrize("kind", [Kind.STORE, Kind.PROBE, Kind.FETCH])
def test_storage_is_detached_while_it_works(kind):
    bench = Bench(storage=WAIT)
    bench.compute()
    bench.turn()
    bench.mover.end()
    bench.turn()
    if kind is not Kind.STORE:
        bench.settle()
        bench = Bench(storage=WAIT, mover=bench.mover)
        fetched = prefetch(bench)
        assert not fetched.is_over
    if kind is Kind.FETCH:
        bench.mover.end()
        bench.turn()
    assert bench.mover.orders[0][0].kind is kind
    bench.tiers.detach()
    bench.settle()
    assert bench.tiers.storage is None
    assert not bench.tiers.host.pages[0].given.stored.any(), "another storage does not have it"
    assert not bench.tiers.host.pages[0].readers.any()
    if kind is Kind.STORE:
        return
    assert fetched.is_over
    assert bool(len(bench.tiers.host.pages[0])) == (kind is Kind.FETCH), "what had begun to come is kept"


def test_a_storage_that_was_cleared_gets_everything_again():
    bench = Bench(storage=WAIT)
    bench.compute()
    bench.settle()
    bench.mover.stored.clear()
    bench.tiers.storage.forget_stored()
    assert save(bench).storage == 0
    bench.settle()
    assert save(bench).is_whole
    assert len(bench.mover.stored) == len(TOKENS) // SIZE


@pytest.mark.parametrize("kind", [Kind.STORE, Kind.FETCH])
def test_what_was_moving_when_storage_was_cleared_does_not_count_as_stored(kind):
    """The mover is through with the order, and the scheduler has not heard of it."""
    bench = Bench(storage=WAIT)
    bench.compute()
    bench.turn()
    bench.mover.end()
    bench.turn()
    if kind is Kind.FETCH:
        bench.settle()
        bench = Bench(storage=WAIT, mover=bench.mover)
        prefetch(bench)
        bench.mover.end()
        bench.turn()
    assert bench.mover.end().kind is kind
    bench.mover.stored.clear()
    bench.tiers.storage.forget_stored()
    bench.turn()
    assert not bench.tiers.host.pages[0].given.stored.any()


def test_ages_of_host_pages():
    bench = Bench(host=8)
    bench.compute()
    bench.settle()
    bench.evict_all()
    ages = bench.tiers.host.pages[0].ages
    assert not sum(ages.hit)
    bench.load()
    assert sum(ages.hit) == 8
    assert not sum(ages.evicted)
    bench.evict_all()
    bench.compute(TOKENS + 100)
    bench.evict_all()
    bench.settle()
    assert sum(ages.evicted) == 8


def test_a_node_that_is_evicted_waits_for_no_copy():
    bench = Bench()
    for number in range(6):
        bench.compute(TOKENS[:4] + 100 * number)
    bench.turn()
    assert len(bench.mover.orders) == 4, "no more at a time"
    assert len(bench.tiers.backup._waiting) == 2
    bench.evict_all()
    assert len(bench.tiers.backup._waiting) == 0
    assert bench.tiers.backup.queued_pages == 2, "they are copied because they are evicted"


def test_pages_that_are_too_many_for_the_queue_are_stored_too(monkeypatch):
    monkeypatch.setattr("freehold.memory.tiers.storage.QUEUE_MAX", 3)
    bench = Bench(storage=WAIT)
    bench.compute()
    bench.turn()
    bench.mover.end()
    bench.memory.tiers.transfers.settle_all(bench.now)
    assert len(bench.tiers.storage._queue) == 3
    assert bench.tiers.storage.queued_pages == 8
    bench.settle()
    assert len(bench.mover.stored) == len(TOKENS) // SIZE
    assert bench.tiers.storage.dropped == 0


def test_prefetches_under_way_are_bounded(monkeypatch):
    monkeypatch.setattr("freehold.memory.tiers.storage.PREFETCHES_MAX", 2)
    bench = Bench(storage=WAIT)
    found = []
    for number in range(3):
        tokens = TOKENS + 100 * number
        keys = bench.tiers.keys(namespace(bench), tokens)
        found.append(finished(bench.tiers.storage.prefetching(namespace(bench), keys, len(tokens), bench.now)))
    assert [one is not None for one in found] == [True, True, False]
    bench.settle()
    assert prefetch(bench) is not None


def test_what_is_saved_waits_for_no_pause_of_copies_that_were_made_ahead():
    bench = Bench(storage=WAIT)

    def fail():
        bench.mover.end(whole=[[False] * (len(TOKENS) // SIZE)])
        bench.turn()
        assert not bench.mover.orders, "it is not tried at once"

    bench.compute()
    bench.turn()
    for _ in range(8):  # pauses of 1, 2, 4, ... 60 seconds
        fail()
        bench.turn(RETRY_MAX_S)
    fail()
    save(bench)
    bench.turn()
    for _ in range(8):
        fail()
        bench.turn(ASKED_RETRY_MAX_S)
