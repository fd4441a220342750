"""Host memory under the prefix tree: who owns what while pages are on their way, and what is found."""

import threading
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_groups import advance
from tier_bench import FULL, SIZE, STATE, TOKENS, WINDOW, Bench, namespaced

from freehold.contract.orders import Kind
from freehold.memory import LeaseError, OwnershipError, PinKind, PrefetchPolicy, WritePolicy
from freehold.memory.explain import explain
from freehold.memory.ledger import owner
from freehold.memory.ledger.epochs import Epochs
from freehold.memory.tiers.backoff import RETRY_S
from freehold.memory.tiers.counts import count_tiers, describe_tiers
from freehold.memory.tiers.host import HostPages
from freehold.memory.tiers.loads import DECLINED_MAX
from freehold.memory.tiers.transfer import LATE_S, TransferCounts

GROUPS = {
    "full": (FULL,),
    "window": (FULL, WINDOW),
    "state": (FULL, STATE),
    "only states": (STATE,),
    "two": (FULL, FULL),
}


@pytest.mark.parametrize("policy", list(WritePolicy))
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_what_is_evicted_comes_back_whole(groups, policy):
    bench = Bench(*groups, policy=policy)
    bench.compute(checkpoints=(16,))
    bench.memory.leases.open(bench.memory.match("", np.append(TOKENS, np.int32(0)))).use()  # for the selective policy
    for lease in bench.memory.leases.open_leases:
        lease.release()
    bench.settle()
    bench.evict_all()
    bench.settle()
    assert bench.matched() == 0
    assert bench.load() == len(TOKENS)
    before = bench.memory.counts()
    assert before.transfer == before.limbo == 0
    assert bench.plan() is None


def test_nothing_is_found_on_the_host_before_all_of_it_has_arrived():
    bench = Bench()
    bench.compute()
    bench.turn()
    assert bench.host_free == [56]
    assert len(bench.tiers.host.pages[0]) == 0
    assert not any(key in bench.tiers.host.pages[0] for key in [bench.tiers.keys(*namespaced(bench))[0]])
    bench.mover.end()
    assert len(bench.tiers.host.pages[0]) == 0, "an outcome was taken in outside an iteration"
    assert bench.memory.has_transfer_work
    bench.turn()
    assert len(bench.tiers.host.pages[0]) == 8


def test_pages_that_are_copied_are_pinned_until_then_and_no_longer():
    bench = Bench(FULL, WINDOW)
    bench.compute()
    bench.turn()
    (node,) = [node for node in bench.memory.tree.nodes() if node.parent is not None]
    assert node.pins[PinKind.BACKUP] == 1
    assert bench.memory.tree.evictable_page_count == 0
    assert bench.memory.tree.bounded[0].evictable_count == 0
    bench.mover.end()
    bench.turn()
    assert node.holds == 0
    assert bench.memory.tree.bounded[0].borrowed_count == 0


def test_a_part_that_failed_is_not_found():
    bench = Bench()
    bench.compute()
    bench.turn()
    bench.mover.end(whole=[[True, True, True, False, True, True, False, False]])
    bench.turn()
    assert len(bench.tiers.host.pages[0]) == 5
    assert bench.host_free == [59]
    assert bench.tiers.transfers.counts[Kind.BACKUP].failed == 1
    bench.evict_all()
    assert bench.load() == 3 * SIZE


@pytest.mark.parametrize("missing", [0, 1])
def test_a_load_is_whole_over_all_groups_or_not_there(missing):
    bench = Bench(FULL, WINDOW)
    bench.compute()
    bench.settle()
    bench.evict_all()
    plan = bench.plan()
    assert plan.page_counts == [8, 2]
    bench.tiers.loads.begin(plan, is_alone=False)
    whole = [np.ones(count) for count in plan.page_counts]
    whole[missing][-1] = 0
    bench.mover.end(whole=whole)
    bench.turn()
    assert bench.matched() == 0
    assert bench.memory.counts(0).free == 64
    assert bench.memory.counts(1).free == 30
    assert bench.load() == len(TOKENS), "the host has them still"


def test_an_outcome_that_comes_twice_counts_once():
    bench = Bench()
    bench.compute()
    bench.turn()
    bench.mover.end(times=2)
    bench.turn()
    assert len(bench.tiers.host.pages[0]) == 8
    bench.evict_all()
    bench.tiers.loads.begin(bench.plan(), is_alone=False)
    bench.mover.end(times=2)
    bench.turn()
    assert bench.matched() == len(TOKENS)
    assert bench.tiers.loads.loaded_pages == 8


def test_two_that_want_the_same_wait_for_one_load():
    bench = Bench()
    bench.compute()
    bench.settle()
    bench.evict_all()
    plan = bench.plan()
    number = bench.tiers.loads.begin(plan, is_alone=False)
    assert bench.tiers.loads.underway(bench.plan()) == number
    assert bench.tiers.transfers.is_awaited(number)
    bench.settle()
    assert bench.tiers.loads.underway(plan) is None
    assert not bench.tiers.transfers.is_awaited(number)


def test_what_was_computed_meanwhile_stays_and_the_copy_is_freed():
    bench = Bench(FULL, WINDOW)
    bench.compute()
    bench.settle()
    bench.evict_all()
    bench.tiers.loads.begin(bench.plan(), is_alone=False)
    bench.compute(TOKENS[:20])
    free = bench.memory.counts().free
    bench.settle()
    assert bench.matched() == len(TOKENS)
    assert bench.memory.counts().free == free + 5
    bench.settle()


def test_a_load_continues_what_the_device_has_and_protects_it():
    bench = Bench(FULL, WINDOW)
    bench.compute()
    bench.settle()
    bench.memory.tree.evictor.evict(5, "a test")
    assert bench.memory.match("", TOKENS).known == 12
    plan = bench.plan()
    assert plan.page_counts[0] == 5
    bench.tiers.loads.begin(plan, is_alone=False)
    assert bench.memory.tree.evictor.evict(8, "a test") == 0
    bench.settle()
    assert bench.matched() == len(TOKENS)
    assert all(node.holds == 0 for node in bench.memory.tree.nodes())


def test_a_window_that_is_gone_on_the_device_comes_from_the_host():
    """The tokens are known, and their full pages there: only the window is loaded, into the holes."""
    bench = Bench(FULL, WINDOW)
    bench.compute()
    bench.settle()
    (bounded,) = bench.memory.tree.bounded
    bounded.evict(bounded.page_count)
    match = bench.memory.match("", np.append(TOKENS, np.int32(0)))
    assert (match.length, match.known) == (0, 32)
    plan = bench.plan()
    assert plan.page_counts == [0, 2]
    assert bench.load() == len(TOKENS)


def test_a_load_does_not_evict_its_own_source():
    """A host of 8 pages, all of them about to be loaded, and evictions that want to be written there."""
    bench = Bench(policy=WritePolicy.WRITE_BACK, host=16, pages=12)
    bench.compute()
    bench.settle()
    bench.evict_all()
    bench.settle()
    other = np.arange(200, 248, dtype=np.int32)
    bench.compute(other[:44])
    sources = dict(bench.tiers.host.pages[0].entries())
    assert bench.tiers.loads.begin(bench.plan(), is_alone=False) is None  # room is being made by copying
    bench.settle()
    assert bench.tiers.loads.begin(bench.plan(), is_alone=False) is not None
    bench.turn()
    assert sources.items() <= dict(bench.tiers.host.pages[0].entries()).items()
    bench.settle()
    assert bench.matched() == len(TOKENS)


def test_pages_that_are_evicted_with_write_back_are_free_when_they_are_copied():
    bench = Bench(policy=WritePolicy.WRITE_BACK)
    bench.compute()
    bench.turn()
    assert not bench.mover.orders
    bench.evict_all()
    assert bench.memory.counts().free == 56
    assert bench.memory.counts().transfer == 8
    assert bench.memory.room.is_returning
    bench.turn()
    assert bench.memory.counts().free == 56
    bench.mover.end()
    bench.turn()
    assert bench.memory.counts().free == 64
    assert bench.load() == len(TOKENS)


def test_mirrors_go_before_what_only_the_host_has():
    """A host smaller than the device stays useful: what the device has as well is worth least there."""
    bench = Bench(host=12)
    bench.compute()
    bench.settle()
    bench.evict_all()
    for number in (1, 2, 3):
        bench.compute(TOKENS + 100 * number)
        bench.settle()
    assert bench.load() == len(TOKENS)


def test_the_beginning_of_a_prefix_is_kept_longer_than_its_end_while_the_device_has_it():
    bench = Bench(host=8)
    bench.compute()
    bench.settle()
    bench.compute(np.arange(100, 116, dtype=np.int32))
    bench.settle()
    bench.evict_all()
    bench.settle()
    assert bench.load() == 16


OWNED = ("mirror", "alone")  # pages of entries


class Order:
    """Entries in the order of their uses, oldest first, and what is known of each: plain lists and sets."""

    def __init__(self, capacity):
        self.capacity, self.entries, self.mirrors = capacity, [], []
        self.on_device, self.owed, self.read = set(), set(), Counter()

    def turns(self):
        """As they go: mirrors, newest first, then the others, then mirrors that are owed to storage."""
        mirrors = self.mirrors[::-1]
        return (
            [key for key in mirrors if key not in self.owed]
            + self.entries
            + [key for key in mirrors if key in self.owed]
        )

    def queue_of(self, key):
        return self.mirrors if key in self.on_device else self.entries

    def make_room(self, count):
        short = len(self.entries + self.mirrors) + count - self.capacity
        for key in [key for key in self.turns() if not self.read[key]][: max(short, 0)]:
            self.queue_of(key).remove(key)
            self.owed.discard(key)
        return min(count, self.capacity - len(self.entries + self.mirrors))

    def move(self, keys, before):
        """Entries among `keys` come from the queue `before` to the end of theirs, the first of them last."""
        for key in [key for key in keys[::-1] if key in before]:
            before.remove(key)
            self.queue_of(key).append(key)


@settings(max_examples=150)
@given(st.data())
def test_entries_go_in_the_order_of_their_uses(data):
    pages, order, held = HostPages(6, 4, Epochs()), Order(6), []
    keys, by = [bytes([n]) for n in range(9)], owner.transfer(1)
    verbs = ["add", "add", "hold", "hold", "drop", "appeared", "vanished", "owe", "stored", "touch"]
    for _ in range(data.draw(st.integers(1, 25))):
        verb = data.draw(st.sampled_from(verbs))
        some = data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=3, unique=True))
        there = [key for key in some if key in order.entries + order.mirrors]
        if verb == "add":
            new = [key for key in some if key not in there]
            new = new[: order.make_room(len(new))]
            got = pages.allocate(len([key for key in some if key not in there]), by)
            assert len(got) == len(new)
            pages.add(new, got, by)
            for key in new[::-1]:
                order.queue_of(key).append(key)
        elif verb == "hold":
            held.append((there, pages.hold(there)))
            order.read.update(there)
        elif verb == "drop" and held:
            read, part = held.pop()
            pages.drop(part)
            order.read.subtract(read)
        elif verb == "appeared":
            pages.appeared(some)
            order.on_device.update(some)
            order.move(some[::-1], order.entries)
        elif verb == "vanished":
            pages.vanished(some)
            order.on_device.difference_update(some)
            order.move(some, order.mirrors)
        elif verb == "owe":
            pages.given.owe(pages.pages_of(some))
            order.owed.update(key for key in there if not pages.given.stored[pages.pages_of([key])[0]])
        elif verb == "stored":
            part = pages.hold(there)
            pages.drop(part)
            pages.given.has(part)
            order.owed.difference_update(there)
        elif verb == "touch":
            pages.touch(some)
            order.move([key for key in some if key in order.entries], order.entries)
        assert [key for key, _ in pages._in_turn()] == order.turns()
        assert {key for key, _ in pages.entries() if pages.is_mirror(key)} == set(order.mirrors)
        assert pages.has(keys).tolist() == [key in pages for key in keys]
        assert (len(pages), pages.mirror_count) == (len(order.turns()), len(order.mirrors))
        assert pages.readers.tolist() == [sum(page in part for _, part in held) for page in range(7)]
        assert [key for key in keys if pages.given.owed[pages.pages_of([key])[0]]] == sorted(order.owed)


def test_a_second_copy_under_a_key_is_freed():
    bench = Bench()
    pages = bench.tiers.host.pages[0]
    for _ in range(2):
        pages.add([b"a", b"b", b"b"], pages.allocate(3, owner.transfer(1)), owner.transfer(1))
    assert (len(pages), pages.pool.free_count) == (2, 62)
    bench.memory.audit()


@pytest.mark.parametrize("capacity", [4, 5, 8, 9])
def test_every_entry_is_looked_at_whatever_a_slice_is(capacity, monkeypatch):
    for name in ("ENTRIES_AT_ONCE", "CLEARED_AT_ONCE"):
        monkeypatch.setattr(f"freehold.memory.tiers.host.{name}", 4)
    pages = Bench(host=capacity).tiers.host.pages[0]
    keys = [bytes([number]) for number in range(capacity)]
    pages.add(keys, pages.allocate(capacity, owner.transfer(1)), owner.transfer(1))
    slices = [part.tolist() for part in pages.pages_of_entries()]
    assert sorted(page for part in slices for page in part) == list(range(1, capacity + 1))
    assert [len(part) for part in slices] == [4] * (capacity // 4) + [capacity % 4] * (capacity % 4 > 0)
    assert sorted(pages.keys_of(np.arange(1, capacity + 1))) == keys
    read = pages.hold(keys[1:2])
    assert len(list(pages.clearing())) == -(-capacity // 4)
    assert [key for key, _ in pages.entries()] == keys[1:2], "a transfer reads it"
    pages.drop(read)


def test_the_beginning_of_a_prefix_is_kept_longer_than_its_end():
    bench = Bench(host=8)
    bench.compute()
    bench.settle()
    bench.evict_all()
    bench.compute(np.arange(100, 116, dtype=np.int32))
    bench.settle()
    bench.evict_all()
    bench.settle()
    assert bench.load() == 16


def test_a_late_copy_gives_its_source_back_and_is_not_believed():
    bench = Bench()
    bench.compute()
    bench.turn()
    bench.turn(LATE_S[Kind.BACKUP] + 1)
    assert bench.memory.tree.evictable_page_count == 8
    assert bench.host_free == [56], "somebody may still write there"
    bench.evict_all()
    bench.mover.end()
    bench.turn()
    assert bench.host_free == [64]
    assert bench.plan() is None


def test_memory_that_is_short_does_not_wait_for_a_copy():
    bench = Bench(pages=12)
    bench.compute()
    bench.turn()
    assert bench.memory.tree.evictable_page_count == 0
    assert bench.memory.room.make_for([10])
    bench.mover.end()
    bench.turn()
    assert bench.host_free == [64]


def test_pages_that_a_copy_pins_are_on_their_way():
    bench = Bench()
    bench.compute()
    bench.turn()
    assert bench.memory.counts().pinned == 8
    assert bench.memory.room.is_returning
    bench.mover.end()
    bench.turn()
    assert not bench.memory.room.is_returning


def test_what_a_load_takes_is_learned_from_several():
    bench = Bench()
    bench.compute()
    loads, told = bench.tiers.loads, []
    for seconds in (9.0, 0.02, 0.03, 0.04, 0.01, 0.05, 0.06):
        bench.settle()
        bench.evict_all()
        told.append(loads.seconds(bench.plan()))
        bench.mover.seconds = seconds
        bench.load()
    assert told == pytest.approx([0, 0, 0.02, 0.03, 0.03, 0.03, 0.03]), "the first takes long"
    bench.settle()
    bench.evict_all()
    assert loads.seconds(bench.plan()) == pytest.approx(0.04), "of the last five"
    tokens_s = 0.03 / len(TOKENS)
    begun = [loads.pays(bench.plan(), tokens_s) for _ in range(2 * DECLINED_MAX)]
    assert np.flatnonzero(begun).tolist() == [DECLINED_MAX - 1, 2 * DECLINED_MAX - 1], "one is tried now and then"
    assert loads.pays(bench.plan(), 0.041 / len(TOKENS))
    assert loads.pays(bench.plan(), 0.0), "nothing is known of computing"


def test_a_host_page_that_nothing_reads_is_not_dropped():
    bench = Bench()
    bench.compute()
    bench.settle()
    pages, keys = bench.tiers.host.pages[0], bench.tiers.keys(bench.memory.match("", TOKENS).namespace, TOKENS)
    held = pages.hold([keys[0]])
    other = next(page for _, page in pages.entries() if page != held[0])
    with pytest.raises(LeaseError, match="without a reader"):
        pages.drop(np.array([held[0], other], np.int32))
    pages.drop(held)


def test_late_transfers_are_not_counted_on():
    bench = Bench(policy=WritePolicy.WRITE_BACK)
    bench.compute()
    bench.evict_all()
    bench.turn()
    assert bench.memory.awaits_transfers
    assert bench.memory.room.reachable.tolist() == [64]
    bench.turn(LATE_S[Kind.BACKUP] + 1)
    assert not bench.memory.awaits_transfers
    assert not bench.memory.room.is_returning
    assert bench.memory.counts().free == 64, "it may be overwritten: the copy is not believed"


def test_pages_that_a_load_has_taken_do_not_come_back_by_themselves():
    bench = Bench()
    bench.compute()
    bench.settle()
    bench.evict_all()
    assert bench.memory.room.reachable.tolist() == [64]
    assert bench.tiers.loads.begin(bench.plan(), is_alone=False) is not None
    assert bench.memory.room.reachable.tolist() == [64 - 8]
    bench.settle()


def test_while_copies_are_late_evictions_wait_for_none():
    bench = Bench(policy=WritePolicy.WRITE_BACK)
    bench.compute()
    bench.evict_all()
    bench.turn()
    bench.turn(LATE_S[Kind.BACKUP] + 1)
    for _ in range(3):
        bench.compute()
        bench.evict_all()
        assert bench.memory.counts().free == 64, "its pages wait for a copier that hangs"
        bench.turn()
    assert len(bench.mover.orders) == 1
    assert bench.tiers.backup.abandoned == 8 * 4
    bench.mover.end()
    bench.turn()
    bench.compute()
    bench.evict_all()
    bench.settle()
    assert bench.load() == len(TOKENS), "copies are made again"


def test_kv_of_other_weights_never_comes_into_the_tree():
    bench = Bench()
    bench.compute()
    bench.settle()
    bench.evict_all()
    bench.tiers.loads.begin(bench.plan(), is_alone=False)
    bench.memory.replace_weights(b"other")
    bench.settle()
    assert bench.matched() == 0
    assert bench.plan() is None
    assert bench.memory.counts().free == 64
    bench.compute()
    bench.settle()
    bench.memory.replace_weights(b"")
    bench.settle()
    assert bench.plan() is None
    assert bench.host_free == [64]


def test_namespaces_share_nothing_on_the_host():
    bench = Bench()
    bench.compute()
    bench.settle()
    bench.evict_all()
    assert bench.plan(salt="tenant") is None
    assert bench.plan() is not None


def test_another_thread_can_report_but_not_settle():
    bench = Bench()
    bench.memory.epochs.bind_thread()
    bench.compute()
    bench.turn()
    reporter = threading.Thread(target=bench.mover.end)
    reporter.start()
    reporter.join()
    errors = []

    def settle():
        try:
            bench.memory.pass_time(1.0)
        except OwnershipError as error:
            errors.append(error)

    thread = threading.Thread(target=settle)
    thread.start()
    thread.join()
    assert errors


def test_flushing_forgets_what_is_being_copied():
    bench = Bench(FULL, WINDOW)
    bench.compute()
    bench.turn()
    assert bench.memory.tree.evictable_page_count == 0, "copies are under way"
    bench.memory.flush()
    assert bench.matched() == bench.memory.tree.page_count == 0
    bench.settle()
    bench.memory.audit()
    assert [len(pages) for pages in bench.tiers.host.pages] == [0, 0]


def test_flushing_forgets_the_host_as_well():
    for policy in WritePolicy:
        bench = Bench(policy=policy)
        bench.compute()
        bench.settle()
        bench.memory.flush()
        bench.settle()
        assert bench.host_free == [64]
        assert bench.memory.counts().free == 64


def test_a_node_that_is_copied_grows_into_few_nodes():
    """A chunk that is published while the one before it is copied begins a node; afterwards nodes grow in place."""
    bench = Bench()
    memory, tokens = bench.memory, np.arange(1, 129, dtype=np.int32)
    lease = memory.leases.open(memory.match("", tokens))
    for _ in range(8):
        advance(memory, lease, 16, decodes=False)
        memory.publish(lease, tokens[: lease.committed])
        bench.settle()
    assert sum(1 for _ in memory.tree.nodes()) == 2  # the root and one more
    lease.release()


@pytest.mark.parametrize("most", [3, 4, 7, 8])
def test_a_long_node_is_copied_in_parts(most, monkeypatch):
    monkeypatch.setattr("freehold.memory.tiers.backup.PAGES_MAX", most)
    bench = Bench()
    bench.compute()
    bench.turn()
    assert len(bench.mover.orders[0][0].keys[0]) == most
    bench.settle()
    assert len(bench.tiers.host.pages[0]) == 8


def test_what_a_split_cuts_off_is_copied_too():
    bench = Bench()
    bench.compute()
    bench.compute(np.concatenate([TOKENS[:12], TOKENS[:4] + 50]))
    bench.settle()
    assert len(bench.tiers.host.pages[0]) == 9


def test_a_page_in_transfer_is_explained():
    bench = Bench(policy=WritePolicy.WRITE_BACK)
    bench.compute()
    bench.evict_all()
    page = int(bench.tiers.backup.rescued_pages(0)[0])
    assert "about to be copied to the host" in explain(bench.memory, page)
    bench.turn()
    assert "a backup of 8 pages" in explain(bench.memory, page)


def test_all_numbers_of_the_tiers():
    """Three prefixes of eight pages: one is copied and stored but for a page or two, which are tried again, and part of
    it is loaded. A copy of the next is late. In the end storage has all, by way of a host that has room for nine."""
    bench = Bench(host=9, storage=PrefetchPolicy.WAIT_COMPLETE)
    bench.compute()
    bench.turn()
    bench.mover.end(whole=[[True] * 7 + [False]])
    bench.turn()
    told = count_tiers(bench.tiers)
    assert told.host_pages == {"full": {"capacity": 9, "free": 2, "mirror": 7, "alone": 0, "transfer": 0}}
    assert told.moved_pages == {"backup": 7, "load": 0, "store": 0, "fetch": 0}
    assert told.transfers["backup"] == TransferCounts(0, 1, 1, 0.01)
    assert told.transfers["store"] == TransferCounts(1, 0, 0, 0.0)
    assert told.queued_pages == {"backup": 8, "store": 0}, "the node is looked at again"
    bench.mover.end(whole=[[True] * 5 + [False] * 2])
    bench.turn()
    assert count_tiers(bench.tiers).queued_pages["store"] == 2
    bench.evict_all()
    assert count_tiers(bench.tiers).queued_pages["backup"] == 1, "what has no copy"
    assert bench.load(TOKENS[:12]) == 12
    told = count_tiers(bench.tiers)
    assert told.host_pages["full"] == {"capacity": 9, "free": 1, "mirror": 3, "alone": 5, "transfer": 0}
    assert told.moved_pages == {"backup": 8, "load": 3, "store": 6, "fetch": 0}
    assert told.lost_pages == {"host_full": 0, "abandoned": 0, "not_stored": 2, "host_evicted": 0}
    bench.turn(RETRY_S)
    bench.settle()
    bench.compute(TOKENS + 50)
    bench.turn()
    told = count_tiers(bench.tiers)
    assert told.host_pages["full"] == {"capacity": 9, "free": 0, "mirror": 2, "alone": 5, "transfer": 2}
    assert told.moved_pages["store"] == 8
    assert [told.transfers["backup"].in_flight, told.transfers["backup"].ended] == [1, 2]
    bench.turn(LATE_S[Kind.BACKUP] + 0.1)
    assert count_tiers(bench.tiers).lost_pages["abandoned"] == 2
    bench.turn(2 * RETRY_S)
    bench.compute(TOKENS + 90)
    bench.settle()
    told = describe_tiers(bench.tiers)
    assert told["moved_pages"]["store"] == len(bench.mover.stored) == 24
    assert told["queued_pages"] == {"backup": 0, "store": 0}
    evicted, copied = told["lost_pages"]["host_evicted"], told["moved_pages"]["backup"]
    assert copied == evicted + sum(count for name, count in told["host_pages"]["full"].items() if name in OWNED)
    assert told["transfers"]["backup"]["failed"] == 1
    assert told["transfers"]["backup"]["seconds"] == pytest.approx(0.01 * told["transfers"]["backup"]["ended"])
    assert sum(told["host_page_ages_in_steps"]["full"]["evicted"].values()) == evicted
    assert sum(told["host_page_ages_in_steps"]["full"]["hit"].values()) == 3
    bench.tiers.detach()
    told = count_tiers(bench.tiers)
    assert (told.moved_pages["store"], told.lost_pages["not_stored"], told.queued_pages["store"]) == (0, 0, 0)


@pytest.mark.parametrize("at_once", [1, 3, 512])
@pytest.mark.parametrize("limit", [0, 3, 4, 17, 32, 100])
@pytest.mark.parametrize("held", [0, 4, 8])
def test_keys_are_made_a_few_at_a_time_as_far_as_the_host_may_have_them(held, limit, at_once, monkeypatch):
    monkeypatch.setattr("freehold.memory.tiers.reach.COLUMNS_AT_ONCE", at_once)
    bench, made, most = Bench(), 0, min(limit // SIZE, len(TOKENS) // SIZE)
    if held:
        bench.compute(TOKENS[: held * SIZE])
        bench.settle()
        bench.evict_all()
    match = bench.memory.match("", TOKENS)
    keys = bench.tiers.keys(match.namespace, TOKENS)
    while made < most and made <= held:
        made = min(made + at_once, most)
        is_more = made < most and made <= held
        assert (bench.tiers.reach.hash_some(match, keys, limit), keys.made) == (is_more, made)
    assert not bench.tiers.reach.hash_some(match, keys, limit)
    assert keys.made == made
