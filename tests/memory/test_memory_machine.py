"""Pool, tree and leases against a brute-force model: random operations, every page checked after each."""

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from freehold.config import EVICTION_POLICIES
from freehold.memory import Memory, MemoryShape, OutOfPages, Retention
from freehold.memory.ledger.owner import FREE, OwnerKind, kind_of
from freehold.simulation.victims import Victims

ALPHABET = 3  # few distinct tokens, so that prefixes are shared and diverge inside nodes


class Sequence:
    """What the model knows of a lease."""

    def __init__(self, lease, namespace, tokens):
        self.lease = lease
        self.namespace = namespace
        self.tokens = tokens
        self.last_step = 0


class MemoryMachine(RuleBasedStateMachine):
    """The oracle: `content` says what was last written to each slot, `tree` which page-aligned prefixes
    have been published and not evicted, `in_flight` which pages each running step may touch."""

    @initialize(
        page_size=st.sampled_from([1, 4, 16]),
        pages=st.integers(6, 30),
        policy=st.sampled_from(EVICTION_POLICIES),
        quota=st.sampled_from([None, 0.3]),
    )
    def start(self, page_size, pages, policy, quota):
        self.size = page_size
        self.now = 0
        self.memory = Memory(MemoryShape(pages, page_size, 4, pages * page_size, policy, tenant_quota=quota))
        Victims(self.memory)
        self.sequences = []
        self.content = {}
        self.in_flight = {}
        self.tree = {}
        self.levels = {}  # by prefix: its level, every how many seconds it is halved, and when next
        self.parked = {}  # by name: the namespace and tokens of a tail
        self.used = 0  # pages, so often as requests started with them

    # -- the oracle's view ----------------------------------------------------------------------------

    def row_pages(self, sequence, start, end):
        return sequence.lease.pages(start, end)[0].tolist()

    def check_prefix(self, sequence):
        """Every committed position is in a slot that holds exactly this sequence's prefix."""
        committed = sequence.lease.committed
        for position in range(committed):
            page = self.row_pages(sequence, 0, sequence.lease.allocated)[position // self.size]
            expected = (sequence.namespace, *sequence.tokens[: position + 1])
            assert self.content[page, position % self.size] == expected

    def tree_prefixes(self):
        """Every page-aligned prefix in the real tree -> its page."""
        found = {}
        for node in self.memory.tree.nodes():
            if node.parent is None:
                continue
            path = self.memory.tree.path(node)
            tokens = np.concatenate([part.tokens for part in path]).tolist()
            for i, page in enumerate(node.pages[0].tolist()):
                end = node.start + (i + 1) * self.size
                found[(node.namespace.salt, *tokens[:end])] = page
        return found

    def note_tree(self, may_shrink=False, keep=None):
        found = self.tree_prefixes()
        for prefix in self.tree.keys() - found.keys():
            assert may_shrink, f"{prefix} left the tree unasked"
            for sequence in self.sequences:
                own = (sequence.namespace, *sequence.tokens[: sequence.lease.shared])
                assert own[: len(prefix)] != prefix, "a pinned prefix was evicted"
        for pin in self.memory.pins:
            path = np.concatenate([part.tokens for part in self.memory.tree.path(pin.node)]).tolist()
            assert (pin.salt, *path) in found, "a prefix was evicted under an operator's pin"
        self.tree = found
        self.check_levels(found)
        kept = {name: self.parked[name] for name, _ in self.memory.tails}
        stayed = [name in kept for name in self.parked if name != keep]
        assert stayed == sorted(stayed), "a tail went before an older one"
        assert keep is None or keep in kept, "the tail that a row goes on from was given up for it"
        self.parked = kept

    def check_levels(self, found):
        """What hints ask for, and no more, is kept for as long as they say."""
        self.levels = {prefix: level for prefix, level in self.levels.items() if prefix in found and level[0]}
        levels = {}
        for node in self.memory.tree.nodes():
            if node.parent is not None and node.level > 0:
                path = np.concatenate([part.tokens for part in self.memory.tree.path(node)]).tolist()
                for end in range(node.start + self.size, node.end + 1, self.size):
                    levels[(node.namespace.salt, *path[:end])] = [node.level, node.ttl, node.fades_at]
        assert levels == self.levels
        assert len(levels) <= self.memory.shape.pages(0.5)

    # -- operations -----------------------------------------------------------------------------------

    @precondition(lambda self: self.memory.leases.free_row_count)
    @rule(
        tokens=st.lists(st.integers(0, ALPHABET - 1), min_size=1, max_size=80),
        namespace=st.sampled_from(["", "salt"]),
        session=st.sampled_from([None, "s", "t"]),
        priority=st.none() | st.integers(0, 2),
    )
    def open(self, tokens, namespace, session, priority):
        tokens = tokens[: self.memory.leases.token_limit]
        array = np.array(tokens, np.int32)
        match = self.memory.match(namespace, array)
        again = self.memory.match(namespace, array)
        assert (match.node, match.length) == (again.node, again.length), "matching is repeatable"
        longest = 0
        while longest + self.size < len(tokens) and (namespace, *tokens[: longest + self.size]) in self.tree:
            longest += self.size
        assert match.length == longest
        hit, room = self.memory.look_up(namespace, array, session=session), self.memory.room
        reachable = room.reachable - room.taken_by(match)
        sequence = Sequence(self.memory.leases.open(match), namespace, tokens)
        assert (room.reachable == reachable).all(), "a match takes more or less than was said"
        assert sequence.lease.shared == sequence.lease.committed == sequence.lease.allocated == longest
        if priority is not None:
            sequence.lease.use(priority)
            self.used += longest // self.size
        self.sequences.append(sequence)
        self.take_up(sequence, hit, self.parked.get(session))
        self.note_tree()
        assert sum(self.memory.tree.history.ages.hit) == self.used

    def take_up(self, sequence, hit, parked):
        """The tail of a session continues the match, or is left alone."""
        at, tokens = sequence.lease.shared, sequence.tokens
        fits = parked is not None and parked[0] == sequence.namespace and len(parked[1]) < len(tokens)
        fits = fits and parked[1] == tokens[: len(parked[1])] and at == (len(parked[1]) - 1) // self.size * self.size
        assert (hit.tail is not None) == fits
        assert (hit.length, hit.covered(self.size)) == (len(parked[1]) if fits else at, at + self.size * fits)
        if fits and self.memory.epochs.passed(hit.tail.fence):
            sequence.lease.adopt(hit.tail)
            del self.parked[hit.tail.name]
            assert sequence.lease.committed == sequence.lease.reserved == hit.length
            self.check_prefix(sequence)

    def pick(self, data):
        return data.draw(st.sampled_from(self.sequences))

    @precondition(lambda self: self.memory.leases.free_row_count)
    @rule(
        data=st.data(),
        more=st.lists(st.integers(0, ALPHABET - 1), min_size=1, max_size=40),
        session=st.sampled_from([None, "s", "t"]),
        priority=st.integers(0, 2),
        ends=st.booleans(),
    )
    def take_a_turn(self, data, more, session, priority, ends):
        """Of a request that goes on from what is cached, all at once."""
        salt, *tokens = data.draw(st.sampled_from([*sorted(self.tree, key=str), ("",), ("salt",)]))
        self.open.__wrapped__(self, [*tokens, *more], salt, session, priority)
        sequence = self.sequences[-1]
        self.submit(sequence, len(sequence.tokens), 0)
        if sequence.last_step in self.in_flight:
            self.finish(sequence.last_step)
        self.share(sequence)
        if ends:
            self.end(data, sequence, True, session)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), count=st.integers(1, 40), rejected=st.integers(0, 20))
    def run_step(self, data, count, rejected):
        self.submit(self.pick(data), count, rejected)

    def submit(self, sequence, count, rejected):
        """Extend, write and submit; the step stays in flight. The last tokens are drafts that turn out to be
        wrong: their KV is written, and must never be read."""
        lease, memory = sequence.lease, self.memory
        if sequence.last_step in self.in_flight:
            return
        count = min(count, memory.leases.token_limit - lease.committed)
        if count <= 0:
            return
        before = memory.counts()
        needed = -(-(lease.committed + count) // self.size) - lease.allocated // self.size
        try:
            lease.extend(count)
        except OutOfPages:
            assert needed > before.free, "refused although there was room"
            assert memory.counts() == before, "a failed allocation changed something"
            return
        step = memory.epochs.submit()
        touched = set(self.row_pages(sequence, 0, lease.allocated))
        fresh = self.row_pages(sequence, 0, lease.allocated)[lease.allocated // self.size - max(needed, 0) :]
        for pages in self.in_flight.values():
            assert not pages & set(fresh if needed > 0 else []), "a page in use was handed out"
        self.in_flight[step] = touched
        memory.leases.submit(np.array([lease.row]), step)
        sequence.last_step = step
        rejected = min(rejected, count - 1)
        sequence.tokens += [0] * (lease.committed + count - len(sequence.tokens))
        table = self.row_pages(sequence, 0, lease.allocated)
        for position in range(lease.committed, lease.committed + count):
            slot = table[position // self.size], position % self.size
            is_right = position < lease.committed + count - rejected
            self.content[slot] = (sequence.namespace, *sequence.tokens[: position + 1]) if is_right else "rejected"
        sequence.written = lease.committed + count - rejected

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def complete(self, data):
        self.finish(data.draw(st.sampled_from(sorted(self.in_flight))))

    def finish(self, step):
        del self.in_flight[step]
        self.memory.complete(step)
        for sequence in self.sequences:
            if sequence.last_step == step:
                written = np.array([sequence.written])
                self.memory.leases.commit(np.array([sequence.lease.row]), written, written)
                assert sequence.lease.committed == sequence.lease.reserved == sequence.written
                self.check_prefix(sequence)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def publish(self, data):
        self.share(self.pick(data))

    def share(self, sequence):
        shared = sequence.lease.publish(np.array(sequence.tokens, np.int32))
        assert shared == max(sequence.lease.committed // self.size * self.size, shared)
        self.check_prefix(sequence)
        self.note_tree()
        for end in range(self.size, shared + 1, self.size):
            assert (sequence.namespace, *sequence.tokens[:end]) in self.tree

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), to=st.integers(0, 80))
    def trim(self, data, to):
        sequence = self.pick(data)
        lease = sequence.lease
        if sequence.last_step in self.in_flight:
            return
        to = max(to, lease.shared)
        committed = lease.committed
        lease.trim(to)
        assert lease.committed == min(to, committed)
        assert lease.allocated <= max(-(-to // self.size) * self.size, lease.shared)
        self.check_prefix(sequence)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), publish=st.booleans(), session=st.sampled_from([None, "s", "t"]))
    def release(self, data, publish, session):
        self.end(data, self.pick(data), publish, session)

    def end(self, data, sequence, publish, session):
        lease, tokens, room = sequence.lease, sequence.tokens, self.memory.room
        if publish:
            lease.publish(np.array(tokens, np.int32))
        if publish and session is not None:
            end = min(lease.committed, len(tokens))
            self.parked.pop(session, None)
            if end > lease.shared:
                self.parked[session] = sequence.namespace, tokens[:end]
            lease.park(session, np.array(tokens, np.int32))
        gained, released = room.gained_by(np.array([lease.row]))
        salt, *others = data.draw(st.sampled_from([(sequence.namespace, *tokens), *sorted(self.tree, key=str)]))
        match = self.memory.match(salt, np.array([*others, 0], np.int32))
        reachable, taken = room.reachable + gained, room.taken_by(match, released)
        self.sequences.remove(sequence)
        lease.release()
        assert (room.taken_by(match) == taken).all(), "the next row takes more or less than was said"
        assert (room.reachable == reachable).all(), "an end gives more or less than was said"
        self.note_tree()

    @rule()
    def give_back_excess(self):
        self.memory.leases.give_back_excess()
        for sequence in self.sequences:
            lease = sequence.lease
            assert lease.allocated == max(-(-lease.reserved // self.size) * self.size, lease.shared)
            self.check_prefix(sequence)

    @precondition(lambda self: self.tree and self.memory.leases.free_row_count)
    @rule(
        data=st.data(),
        priority=st.sampled_from([0, 1, 3, 40]),
        end=st.none() | st.integers(1, 40),
        ttl=st.sampled_from([1, 9]),
    )
    def retain(self, data, priority, end, ttl):
        salt, *tokens = data.draw(st.sampled_from(sorted(self.tree, key=str)))
        lease = self.memory.leases.open(self.memory.match(salt, np.array([*tokens, 0], np.int32)))
        kept = self.memory.retain(lease, Retention(priority, ttl, end), self.now)
        asked = min(lease.shared, lease.shared if end is None else end) // self.size
        lease.release()
        prefixes = [(salt, *tokens[: self.size * (i + 1)]) for i in range(asked)]
        fresh = [prefix for prefix in prefixes if prefix not in self.levels]
        fits = priority and len(self.levels) + len(fresh) <= self.memory.shape.pages(0.5)
        assert kept == asked * self.size if fits else kept <= asked * self.size
        for prefix in prefixes[: kept // self.size]:
            if priority >= self.levels.get(prefix, [0])[0]:
                self.levels[prefix] = [priority, ttl, self.now + ttl]
        self.note_tree()

    @precondition(lambda self: self.tree)
    @rule(data=st.data(), name=st.sampled_from("ab"))
    def pin(self, data, name):
        if name in {pin.name for pin in self.memory.pins}:
            self.memory.pins.unpin(name)
            return
        salt, *tokens = data.draw(st.sampled_from(sorted(self.tree, key=str)))
        pin = self.memory.pin(name, salt, np.array(tokens, np.int32), None)
        assert self.memory.pins.page_count <= self.memory.pins.limit
        assert pin is None or pin.tokens <= len(tokens)
        self.note_tree()

    @rule(seconds=st.integers(1, 5))
    def pass_time(self, seconds):
        self.now += seconds
        self.memory.pass_time(self.now)
        for level in self.levels.values():
            while level[0] and level[2] <= self.now:
                level[0], level[2] = level[0] // 2, level[2] + level[1]
        self.note_tree()

    @rule(pages=st.integers(1, 4))
    def evict(self, pages):
        could, ages = self.memory.tree.evictable_page_count, self.memory.tree.history.ages
        before = sum(ages.evicted)
        assert self.memory.tree.evictor.evict(pages, "a test") == min(pages, could)
        assert sum(ages.evicted) - before == min(pages, could)
        self.note_tree(may_shrink=True)

    @precondition(lambda self: self.memory.leases.free_row_count)
    @rule(data=st.data(), pages=st.integers(1, 30))
    def make_room(self, data, pages):
        """For a new row that goes on from what is cached. What is in limbo counts as on its way."""
        salt, *tokens = data.draw(st.sampled_from([("",), *sorted(self.tree, key=str)]))
        memory, may_unpin = self.memory, not self.sequences
        memory.leases.give_back_excess()
        session = data.draw(st.sampled_from([None, "s", "t"]))
        hit = memory.look_up(salt, np.array([*tokens, 0], np.int32), session=session)
        could = memory.room.can_be_made([pages], hit, may_unpin)
        lease, before = memory.leases.open(hit.match), memory.counts()
        made, counts = memory.room.make_for([pages], may_unpin, hit.tail), memory.counts()
        if could:
            assert counts.free + counts.limbo == max(before.free + before.limbo, pages), "more than was asked for"
        assert could == (counts.free + counts.limbo >= pages)
        assert made == (counts.free >= pages)
        assert could or not counts.tree, "there was more to be had"
        lease.withdraw()
        self.note_tree(may_shrink=True, keep=None if hit.tail is None else hit.tail.name)

    # -- what always holds ------------------------------------------------------------------------------

    @invariant()
    def every_page_has_one_owner(self):
        if not hasattr(self, "memory"):
            return
        self.memory.audit()
        pool = self.memory.pools[0]
        counts = self.memory.counts()
        assert sum(counts.as_dict().values()) == 2 * counts.capacity
        for pages in self.in_flight.values():
            assert all(pool.owner[page] != FREE for page in pages), "a page that a step touches is free"
        assert counts.free == sum(kind_of(int(owner)) is OwnerKind.FREE for owner in pool.owner)

    def teardown(self):
        if not hasattr(self, "memory"):
            return
        for sequence in self.sequences:
            sequence.lease.release()
        self.memory.pins.give_up()
        for step in sorted(self.in_flight):
            self.memory.complete(step)
        held = self.memory.shape.page_count - self.memory.counts().free
        assert self.memory.flush() == held
        self.memory.audit()
        assert self.memory.counts().free == self.memory.shape.page_count, "leaked"


TestMemory = MemoryMachine.TestCase
TestMemory.settings = settings(max_examples=200, stateful_step_count=110, suppress_health_check=list(HealthCheck))
