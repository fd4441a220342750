"""Events of the cache: a follower knows what is cached, over the wire, too."""

import asyncio
import json
import time

import msgspec
import numpy as np
import pytest
import zmq
from test_groups import compute
from tier_bench import FULL, STATE, TOKENS, WINDOW, Bench

from freehold.contract.orders import Kind
from freehold.contract.prefix_keys import chain
from freehold.contract.slices import finished
from freehold.events.config import EventsConfig
from freehold.events.follower import Follower
from freehold.events.publisher import END, EventPublisher
from freehold.events.wire import AllBlocksCleared, BlockRemoved, BlockStored, decode
from freehold.memory import Memory, MemoryShape, PrefetchPolicy, WritePolicy
from freehold.memory.events import Cleared, EventLog, Medium, Removed, Stored
from freehold.memory.tiers.backoff import RETRY_S
from freehold.memory.tiers.transfer import LATE_S
from freehold.simulation.mirror import Mirror, WrongMirror


def followed(*groups):
    log = EventLog(4)
    memory = Memory(MemoryShape(64, 4, 8, 400, "lru", groups=groups or (FULL,), step_tokens=16), events=log)
    return memory, log, Mirror(log, 4)


KINDS = {"full": (FULL,), "window": (FULL, WINDOW), "two": (FULL, FULL), "states": (STATE,)}


@pytest.mark.parametrize("groups", KINDS.values(), ids=KINDS)
def test_a_follower_knows_what_is_cached(groups):
    memory, _, mirror = followed(*groups)
    for tokens in (TOKENS, np.append(TOKENS[:16], TOKENS[:16]), TOKENS[:8]):
        compute(memory, tokens).release()
        mirror.follow()
        mirror.check(memory)
    memory.tree.evictor.evict(5, "a test")
    for bounded in memory.tree.bounded:
        bounded.evict(3)
    mirror.follow()
    mirror.check(memory)
    memory.flush()
    mirror.follow()
    mirror.check(memory)
    assert not mirror.keys[Medium.DEVICE]


def test_what_events_say():
    memory, log, _ = followed()
    compute(memory, TOKENS, chunk=32).release()
    (stored,) = log.take()
    assert (stored.medium, stored.parent) == (Medium.DEVICE, None)
    assert stored.tokens.tolist() == TOKENS.tolist()
    compute(memory, np.append(TOKENS[:16], TOKENS[:4] + 100)).release()
    (branch,) = log.take()
    assert branch.parent == stored.keys[3]
    assert list(branch.keys) == chain(stored.keys[3], TOKENS[:4] + 100, 4)
    memory.replace_weights()
    (cleared,) = log.take()
    assert isinstance(cleared, Cleared), "one word for all that is gone"


def test_the_host_tells_too():
    bench = Bench(host=8)
    log = EventLog(4)
    bench.memory._tell(log)
    mirror = Mirror(log, 4)
    bench.compute()
    bench.settle()
    bench.evict_all()
    mirror.follow()
    mirror.check(bench.memory)
    assert len(mirror.keys[Medium.HOST]) == 8
    bench.compute(TOKENS[:12] + 100)
    bench.settle()
    mirror.follow()
    mirror.check(bench.memory)
    assert len(mirror.keys[Medium.HOST]) == 8
    bench.memory.flush()
    mirror.follow()
    mirror.check(bench.memory)
    assert not log._coming


def test_what_never_comes_to_the_host_is_forgotten():
    bench = Bench(host=8, storage=PrefetchPolicy.WAIT_COMPLETE)
    log = EventLog(4)
    bench.memory._tell(log)
    bench.compute()
    bench.turn()
    assert len(log._coming) == 8
    bench.turn(LATE_S[Kind.BACKUP] + 1)  # the copy is given up
    bench.mover.end()
    bench.turn()
    assert not log._coming
    bench.turn(RETRY_S)
    assert len(log._coming) == 8, "another copy"
    bench.mover.end(whole=[[False] * 8])
    bench.turn()
    assert not log._coming
    assert all(event.medium is Medium.DEVICE for event in log.take())


@pytest.mark.parametrize("policy", list(WritePolicy))
def test_events_of_the_host_have_tokens_and_parents(policy):
    bench = Bench(policy=policy)
    log = EventLog(4)
    bench.memory._tell(log)
    bench.compute()
    bench.compute(np.concatenate([TOKENS[:8], TOKENS[8:] + 50]))
    bench.compute()
    bench.memory.tree.match(bench.memory.match("", TOKENS).namespace, TOKENS, len(TOKENS))
    finished(bench.tiers.saving(bench.memory.match("", TOKENS).namespace, TOKENS).looking())
    bench.settle()
    found = [event for event in log.take() if isinstance(event, Stored) and event.medium is Medium.HOST]
    keys = bench.tiers.keys(bench.memory.match("", TOKENS).namespace, TOKENS)
    told = {key: event for event in found for key in event.keys}
    assert {keys[column] for column in range(8)} <= set(told)
    first = told[keys[0]]
    assert first.parent is None
    assert first.tokens[:4].tolist() == TOKENS[:4].tolist()
    last = told[keys[7]]
    assert last.tokens[-4:].tolist() == TOKENS[-4:].tolist()
    assert all(event.parent is None or chain(event.parent, event.tokens, 4) == list(event.keys) for event in found)


def test_what_comes_from_storage_is_told_too():
    first = Bench(storage=PrefetchPolicy.WAIT_COMPLETE)
    first.compute()
    first.settle()
    bench = Bench(storage=PrefetchPolicy.WAIT_COMPLETE, mover=first.mover)
    log = EventLog(4)
    bench.memory._tell(log)
    mirror = Mirror(log, 4)
    namespace = bench.memory.match("", TOKENS).namespace
    finished(bench.tiers.storage.prefetching(namespace, bench.tiers.keys(namespace, TOKENS), len(TOKENS), bench.now))
    bench.settle()
    mirror.follow()
    mirror.check(bench.memory)
    assert len(mirror.keys[Medium.HOST]) == 8


def test_a_mirror_notices_a_lie():
    memory, log, mirror = followed()
    compute(memory, TOKENS).release()
    mirror.follow()
    with pytest.raises(WrongMirror, match="second time"):
        mirror._apply(Stored([next(iter(mirror.keys[Medium.DEVICE]))], Medium.DEVICE, None, TOKENS[:4]))
    with pytest.raises(WrongMirror, match="not there"):
        mirror._apply(Removed([b"nothing"], Medium.DEVICE))
    memory.tree.evictor.evict(1, "a test")
    log.take()
    with pytest.raises(WrongMirror, match="believes in 1 pages"):
        mirror.check(memory)


# -- over the wire ------------------------------------------------------------------------------------------------


@pytest.fixture
def wire(tmp_path):
    """A publisher, and sockets of a follower."""
    ends = {name: f"ipc://{tmp_path}/{name}" for name in ("pub", "replay")}
    config = {"enable_kv_cache_events": True, "endpoint": ends["pub"], "replay_endpoint": ends["replay"],
              "topic": "kv", "buffer_steps": 3}  # fmt: skip
    publisher = EventPublisher(EventsConfig.parse(json.dumps(config)), 4)
    with zmq.Context() as context, context.socket(zmq.SUB) as sub, context.socket(zmq.REQ) as replay:
        sub.connect(ends["pub"])
        sub.subscribe(b"kv")
        replay.connect(ends["replay"])
        replay.setsockopt(zmq.LINGER, 0)
        yield publisher, sub, replay
    publisher.close()


def asked(replay, first: int):
    """What a follower gets that asks for batches from a number on."""
    replay.send(first.to_bytes(8, "big"))
    assert replay.poll(5000)
    return replay.recv_multipart()


def test_batches_have_numbers_and_can_be_asked_for_again(wire):
    publisher, sub, replay = wire
    events = [[Stored([bytes([n]) * 32], Medium.DEVICE, None, TOKENS[:4])] for n in range(5)]
    publisher.publish([])
    received = []
    while not received:  # until the subscription has arrived, batches go nowhere
        publisher.publish(events[0])
        if sub.poll(100):
            received.append(sub.recv_multipart())
    while sub.poll(200):
        received.append(sub.recv_multipart())
    newest = int.from_bytes(received[-1][1], "big")
    publisher.publish([Removed([b"a" * 32], Medium.HOST), Cleared()])
    assert sub.poll(5000)
    topic, number, payload = sub.recv_multipart()
    assert (topic, int.from_bytes(number, "big")) == (b"kv", newest + 1)
    batch = decode(payload)
    assert batch.events == [BlockRemoved([int.from_bytes(b"a" * 8, "big")], "CPU"), AllBlocksCleared()]
    assert decode(received[0][2]).events == [BlockStored([0], None, [1, 2, 3, 4], 4, None, "GPU")]
    number, payload = asked(replay, newest + 1)
    assert (int.from_bytes(number, "big"), payload) == (newest + 1, msgspec.msgpack.encode(batch))


@pytest.mark.parametrize("since", [None, 0, 2])
def test_a_follower_hears_each_batch_once(tmp_path, since):
    ends = {name: f"ipc://{tmp_path}/{name}" for name in ("pub", "replay")}
    config = EventsConfig(True, endpoint=ends["pub"], replay_endpoint=ends["replay"])
    publisher = EventPublisher(config, 4)

    async def follow() -> list[int]:
        follower, heard = Follower(config, since), []
        await asyncio.sleep(0.3)  # its subscription has arrived
        publisher.publish([Removed([b"k" * 32], Medium.HOST)])  # comes live, and is kept as well
        await asyncio.sleep(0.3)  # it has arrived
        try:
            async for news in follower.batches(idle_ms=20):
                if news is None or not heard:
                    publisher.publish([Removed([b"k" * 32], Medium.HOST)])
                if news is not None:
                    heard.append(news[0])
                if len(heard) >= 6:
                    break
        finally:
            follower.close()
        return heard

    for _ in range(4):
        publisher.publish([Removed([b"k" * 32], Medium.HOST)])
    time.sleep(0.3)  # they are sent, and kept
    heard = asyncio.run(asyncio.wait_for(follow(), 20))
    publisher.close()
    first = heard[0] if since is None else since
    assert heard == list(range(first, first + 6))
    assert first >= 4 or since is not None


def test_a_follower_says_why_it_can_not_follow():
    elsewhere = EventsConfig(True, endpoint="tcp://router:5557")
    with pytest.raises(ValueError, match="router"):
        Follower(elsewhere)
    with pytest.raises(ValueError, match="replay_endpoint"):
        Follower(EventsConfig(True, endpoint="tcp://*:1"), since=3)


def test_who_asks_for_what_is_to_come_hears_where_it_ends(wire):
    _, _, replay = wire
    assert asked(replay, 100) == [END, b""]


def test_events_are_arrays_with_their_name_first(wire):
    """As vLLM's are."""
    publisher, sub, _ = wire
    payload = None
    while payload is None:
        publisher.publish([Stored([bytes(range(32))], Medium.DEVICE, bytes(24) + b"p" * 8, TOKENS[:4])])
        if sub.poll(100):
            payload = sub.recv_multipart()[2]
    seconds, events, rank = msgspec.msgpack.decode(payload)
    key, parent = (int.from_bytes(bits, "big") for bits in (bytes(range(24, 32)), b"p" * 8))
    assert events == [["BlockStored", [key], parent, [1, 2, 3, 4], 4, None, "GPU"]], "hashes are numbers of 64 bits"
    assert rank == 0
    assert seconds > 1.7e9


@pytest.mark.parametrize("text", ["{", '{"endpoint": 5}', '{"publisher": "kafka"}', '{"endpont": "tcp://*:1"}'])
def test_a_wrong_configuration_is_refused_by_name(text):
    with pytest.raises(ValueError, match="kv_events_config"):
        EventsConfig.parse(text)


def test_an_endpoint_that_is_taken_is_refused_by_name():
    config = EventsConfig(enable_kv_cache_events=True, endpoint="ipc:///no/such/folder/socket")
    with pytest.raises(ValueError, match="kv_events_config: ipc:///no/such"):
        EventPublisher(config, 4)
