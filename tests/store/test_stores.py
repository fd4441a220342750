"""What every store promises, held against real ones: a folder, a Redis, an S3."""

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from freehold.contract.prefix_keys import KeyChain, chain, fingerprint, key_in_group
from freehold.runtime.tier_plan import open_storage
from freehold.store.breaker import FAILURES_MAX, RETRY_S, Breaker
from freehold.store.disk import DiskStore
from freehold.store.entry import HEADER_BYTES, decode, encode
from freehold.store.location import open_store
from freehold.store.object_store import ObjectStore
from freehold.store.redis_store import PREFIX, RedisStore
from freehold.store.store import Item, StoreStats, StoreUnavailable

SECOND = 1.0
MANY = 1 << 40


def item(number: int, size: int = 300) -> Item:
    return Item(number.to_bytes(32, "little"), b"", np.random.default_rng(number).bytes(size))


def payloads(store, items) -> list[bytes | None]:
    return [None if one is None else bytes(one) for one in store.get([one.key for one in items], 5 * SECOND)]


@pytest.fixture(params=["disk", "redis", "s3"])
def store(request, tmp_path):
    if request.param == "disk":
        store = DiskStore(tmp_path / "store", MANY, free_floor_bytes=0)
    elif request.param == "redis":
        store = RedisStore(f"redis://127.0.0.1:{request.getfixturevalue('redis_server').port}/0", MANY)
    else:
        request.getfixturevalue("s3_server")
        store = ObjectStore("bucket", "kv")
    yield store
    store.close()


def test_what_is_stored_is_found_and_the_rest_is_not(store):
    items = [item(n, 1 + n * 100) for n in range(70)]
    assert store.put(items, 10 * SECOND) == [True] * 70
    assert payloads(store, [item(99), *items]) == [None, *(one.payload for one in items)]
    assert store.contains([items[69].key, item(99).key], SECOND) == [True, False]
    assert store.put(items[:3], SECOND) == [True] * 3
    store.clear(10 * SECOND)
    assert payloads(store, items[:5]) == [None] * 5


def test_a_large_entry(store):
    large = item(1, 5 << 20)
    assert store.put([large], 10 * SECOND) == [True]
    assert payloads(store, [large]) == [large.payload]


def test_several_threads_at_a_time(store):
    wrong = []

    def use(first: int) -> None:
        items = [item(n) for n in range(first, first + 20)]
        store.put(items, 10 * SECOND)
        if payloads(store, items) != [one.payload for one in items]:
            wrong.append(first)

    threads = [threading.Thread(target=use, args=(20 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_entries_are_listed_read_raw_and_given_up(store):
    items = [item(n) for n in range(40)]
    store.put(items, 10 * SECOND)
    assert set(store.all_keys()) == {one.key for one in items}
    assert decode(items[3].key, store.raw(items[3].key)) == items[3].payload
    assert store.raw(item(99).key) is None
    store.discard([one.key for one in items[:35]])
    assert payloads(store, items) == [None] * 35 + [one.payload for one in items[35:]]
    assert store.put([item(0), item(50)], SECOND) == [True] * 2
    assert payloads(store, [item(0), item(50)]) == [item(0).payload, item(50).payload]


def overwrite(store, key: bytes, raw: bytes) -> None:
    if isinstance(store, RedisStore):
        store._connect().set(PREFIX + key, raw)
    elif isinstance(store, ObjectStore):
        store._store.put(f"{key[:1].hex()}/{key.hex()}", raw)
    else:
        segment, entry = store._of(store._index[key])
        place = segment.place(entry)
        with open(segment.path, "r+b") as file:
            file.seek(place.offset)
            file.write(raw[: place.size].ljust(place.size, b"\0"))


@pytest.mark.parametrize("change", ["cut", "flipped", "of another key", "a stranger's", "nothing"])
def test_damaged_and_foreign_bytes_are_misses_and_counted(store, change):
    good = item(1)
    store.put([good, item(2)], SECOND)
    raw = b"".join(encode(*good))
    flipped = bytearray(raw)
    flipped[HEADER_BYTES + 5] ^= 4
    overwrite(store, good.key, {
        "cut": raw[:-1], "flipped": bytes(flipped), "of another key": b"".join(encode(*item(3))),
        "a stranger's": b"hello", "nothing": b"",
    }[change])  # fmt: skip
    assert payloads(store, [good, item(2)]) == [None, item(2).payload]
    assert store.stats().damaged == 1


# -- servers that fail ------------------------------------------------------------------------------------


@contextmanager
def at_most(seconds: float):
    before = time.monotonic()
    yield
    assert time.monotonic() - before < seconds


def calls(store):
    return [
        lambda: list(store.get([item(1).key], SECOND)),
        lambda: store.put([item(2)], SECOND),
        lambda: store.contains([item(1).key], SECOND),
    ]


@pytest.fixture(params=["redis", "s3"])
def remote(request):
    """A store with short timeouts, and its server."""
    server = request.getfixturevalue(f"{request.param}_server")
    if request.param == "redis":
        store = RedisStore(f"redis://127.0.0.1:{server.port}/0", MANY, timeout=0.5)
    else:
        store = ObjectStore("bucket", timeout=0.5)
    yield store, server
    store.close()


def test_a_server_that_stands_still_costs_no_more_than_the_deadline(remote):
    store, server = remote
    store.put([item(1)], 5 * SECOND)
    server.signal(signal.SIGSTOP)
    for call in calls(store):
        with at_most(3), pytest.raises(StoreUnavailable):
            call()
    server.signal(signal.SIGCONT)
    time.sleep(0.6)  # it answers what it was asked
    assert payloads(store, [item(1)]) == [item(1).payload], "late answers belong to nobody"


def test_a_bucket_that_stands_still_costs_the_deadline_whatever_its_timeout(s3_server):
    store = ObjectStore("bucket", timeout=30)
    s3_server.signal(signal.SIGSTOP)
    with at_most(3), pytest.raises(StoreUnavailable, match=r"within 0.5 s"):
        list(store.get([item(n).key for n in range(3)], 0.5))
    s3_server.signal(signal.SIGCONT)
    store.close()


def test_a_server_that_dies_is_an_error_at_once(remote):
    store, server = remote
    store.put([item(1)], 5 * SECOND)
    server.kill()
    key = item(1).key
    of_people = [
        lambda: store.discard([key]), lambda: store.raw(key), lambda: list(store.all_keys()),
        lambda: list(store.foreign()),
    ]  # fmt: skip
    for call in [*calls(store), *of_people]:
        with at_most(3), pytest.raises(StoreUnavailable):
            call()


def test_a_server_that_is_not_there_is_an_error():
    store = RedisStore("redis://127.0.0.1:1/0", MANY)
    with pytest.raises(StoreUnavailable):
        list(store.get([item(1).key], SECOND))
    store.close()


def test_a_redis_without_memory_drops(redis_server):
    url = f"redis://127.0.0.1:{redis_server.port}/0"
    redis.Redis.from_url(url).config_set("maxmemory", "3mb")
    store = RedisStore(url, MANY)
    items = [item(n, 200_000) for n in range(40)]
    stored = store.put(items, 5 * SECOND)
    assert {*stored} == {True, False}
    assert store.stats().dropped == stored.count(False)
    assert [one is not None for one in payloads(store, items)] == stored
    store.close()


def test_a_redis_beyond_its_cap_is_not_written(redis_server):
    store = RedisStore(f"redis://127.0.0.1:{redis_server.port}/0", capacity_bytes=1000)
    assert store.put([item(1)], SECOND) == [False]
    assert store.stats().dropped == 1
    store.close()


def test_entries_of_redis_live_on_when_they_are_read(redis_server):
    url = f"redis://127.0.0.1:{redis_server.port}/0"
    store = RedisStore(url, MANY, ttl_seconds=1000)
    client: Any = redis.Redis.from_url(url)
    store.put([item(1)], SECOND)
    assert 900 < client.ttl(PREFIX + item(1).key) <= 1000
    client.expire(PREFIX + item(1).key, 5)
    list(store.get([item(1).key], SECOND))
    assert client.ttl(PREFIX + item(1).key) > 900
    store.close()


def test_a_value_of_another_type_is_a_miss_and_no_error_for_the_others(redis_server):
    url = f"redis://127.0.0.1:{redis_server.port}/0"
    store = RedisStore(url, MANY)
    store.put([item(1), item(2)], SECOND)
    client: Any = redis.Redis.from_url(url)
    client.delete(PREFIX + item(1).key)
    client.rpush(PREFIX + item(1).key, "a list")
    assert payloads(store, [item(1), item(2)]) == [None, item(2).payload]
    store.close()


@pytest.fixture
def forbidding(monkeypatch):
    """An S3 that forbids everything, and says why."""

    class Handler(BaseHTTPRequestHandler):
        reason = "AccessDenied"

        def forbid(self):
            body = f"<Error><Code>{self.reason}</Code><Message>no</Message></Error>".encode()
            self.send_response(403)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *_):
            """Nothing."""

    for method in ("GET", "HEAD", "PUT"):
        setattr(Handler, f"do_{method}", Handler.forbid)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield Handler
    server.shutdown()
    server.server_close()


def test_without_the_right_to_list_a_key_that_is_missing_is_a_miss(forbidding):
    store = ObjectStore("bucket")
    store.check(SECOND)
    assert store.contains([item(1).key], SECOND) == [False]
    assert list(store.get([item(1).key], SECOND)) == [None]
    with pytest.raises(StoreUnavailable, match=r"403|permission|Forbidden"):
        store.put([item(1)], SECOND)
    forbidding.reason = "InvalidAccessKeyId"
    with pytest.raises(ValueError, match="InvalidAccessKeyId"):
        store.check(SECOND)
    store.close()


def test_reading_does_not_wait_for_writing(remote, monkeypatch):
    """Each thread that writes is busy."""
    store, _ = remote
    store.put([item(1)], 5 * SECOND)
    may_go_on = threading.Event()
    late = [threading.Thread(target=store._writing.run, args=(may_go_on.wait, 5 * SECOND)) for _ in range(64)]
    for thread in late:
        thread.start()
    with at_most(1):
        assert payloads(store, [item(1)]) == [item(1).payload]
        assert store.contains([item(1).key], SECOND) == [True]
    may_go_on.set()
    for thread in late:
        thread.join()


def test_what_was_stored_in_time_is_said_though_the_rest_was_late(store, monkeypatch):
    """Such a store is slow, and gets on with each call. Only if nothing is in time it counts as one that fails."""
    module, may_go_on = sys.modules[type(store).__module__], threading.Event()
    items = [item(number) for number in range(40)]
    monkeypatch.setattr(module, "BATCH_BYTES", 1000, raising=False)

    def late(key, about, payload, first):
        if key == items[first].key:
            may_go_on.wait(3 * SECOND)  # it takes all the time that there is
        return encode(key, about, payload)

    monkeypatch.setattr(module, "encode", lambda *one: late(*one, 24))
    stored = store.put(items, SECOND)
    count = stored.count(True)
    assert stored == [True] * count + [False] * (40 - count)
    assert store.contains([one.key for one in items[:count]], SECOND) == [True] * count
    assert count >= 4
    monkeypatch.setattr(module, "encode", lambda *one: late(*one, count))
    with pytest.raises(StoreUnavailable, match="no answer within"):
        store.put(items[count:], SECOND)


def test_what_is_late_when_a_store_is_cleared_is_gone_with_the_rest(store):
    may_go_on, late = threading.Event(), item(2)
    store.put([item(1)], 5 * SECOND)
    raw = b"".join(encode(*late))

    def write():
        assert may_go_on.wait(10)
        if isinstance(store, RedisStore):
            store._connect().set(PREFIX + late.key, raw)
        elif isinstance(store, ObjectStore):
            store._store.put(f"{late.key[:1].hex()}/{late.key.hex()}", raw)
        else:
            store._put([late.key], [len(raw)], raw)

    with pytest.raises(StoreUnavailable, match="within"):
        store._writing.run(write, 0.05)
    clearing = threading.Thread(target=store.clear, args=(10 * SECOND,))
    clearing.start()
    time.sleep(0.1)  # so that a clear that waited for nothing would be through
    may_go_on.set()
    clearing.join()
    store._writing.drain(5 * SECOND)
    assert store.contains([item(1).key, late.key], 5 * SECOND) == [False, False]


# -- the breaker ------------------------------------------------------------------------------------------


class Failing:
    """Fails while it is told to."""

    def __init__(self):
        self.calls, self.fails = 0, True

    def get(self, keys, deadline):
        self.calls += 1
        if self.fails:
            raise StoreUnavailable("down")
        return [None] * len(keys)

    def check(self, deadline):
        self.get([], deadline)

    def stats(self):
        return StoreStats(0, 0, 0)


def test_a_store_that_does_not_answer_is_in_trouble_until_a_call_succeeds():
    store = Failing()
    breaker = Breaker(lambda: store)
    with pytest.raises(StoreUnavailable, match="down"):
        breaker.check(SECOND)
    assert breaker.stats().trouble == "down"
    store.fails = False
    assert list(breaker.get([b""], SECOND)) == [None]
    assert breaker.stats().trouble is None


def test_a_store_that_fails_is_left_alone_and_tried_again():
    now, store = [0.0], Failing()
    breaker = Breaker(lambda: store, lambda: now[0])

    def ask():
        return list(breaker.get([b""], SECOND))

    for _ in range(FAILURES_MAX):
        with pytest.raises(StoreUnavailable, match="down"):
            ask()
    for _ in range(10):
        with pytest.raises(StoreUnavailable, match="left alone"):
            ask()
    assert (store.calls, breaker._reading.refused, breaker.trouble) == (FAILURES_MAX, 10, "down")
    now[0] += RETRY_S
    with pytest.raises(StoreUnavailable, match="down"):
        ask()
    with pytest.raises(StoreUnavailable, match="left alone"):
        ask()
    now[0] += RETRY_S
    store.fails = False
    assert ask() == [None]
    assert ask() == [None]
    assert breaker.trouble is None


def test_one_call_tries_while_the_others_are_refused():
    now, store = [0.0], Failing()
    breaker = Breaker(lambda: store, lambda: now[0])
    for _ in range(FAILURES_MAX):
        with pytest.raises(StoreUnavailable):
            list(breaker.get([b""], SECOND))
    now[0] += RETRY_S
    inside: list[str] = []
    store.fails = False
    real = store.get

    def slow(keys, deadline):
        with pytest.raises(StoreUnavailable, match="left alone"):
            list(breaker.get([b""], SECOND))
        inside.append("refused")
        return real(keys, deadline)

    store.get = slow
    list(breaker.get([b""], SECOND))
    assert inside == ["refused"]


def test_successes_between_failures_keep_it_closed():
    store = Failing()
    breaker = Breaker(lambda: store)
    for _ in range(3):
        store.fails = True
        for _ in range(FAILURES_MAX - 1):
            with pytest.raises(StoreUnavailable, match="down"):
                list(breaker.get([b""], SECOND))
        store.fails = False
        list(breaker.get([b""], SECOND))
    assert breaker.trouble is None


class Half(Failing):
    """Knows which keys there are, and can't read them; tells of the calls it gets."""

    def contains(self, keys, deadline):
        return [True] * len(keys)


def test_a_store_that_can_not_be_read_is_left_alone_though_it_answers():
    store = Half()
    breaker = Breaker(lambda: store)
    for _ in range(20):
        assert breaker.contains([b""], SECOND) == [True]
        with pytest.raises(StoreUnavailable):
            list(breaker.get([b""], SECOND))
    assert store.calls == FAILURES_MAX


@pytest.mark.parametrize("count", [1, 3])
def test_who_takes_what_was_asked_for_and_no_more_has_succeeded(count):
    """As the threads that fetch do."""
    store = Failing()
    breaker = Breaker(lambda: store)

    def fetch():
        found = iter(breaker.get([b""] * count, SECOND))
        return [next(found) for _ in range(count)]

    for _ in range(3):
        for _ in range(FAILURES_MAX - 1):
            store.fails = True
            with pytest.raises(StoreUnavailable, match="down"):
                fetch()
        store.fails = False
        assert fetch() == [None] * count
    assert breaker.trouble is None


def test_a_store_that_can_not_be_opened_is_used_once_it_can(tmp_path, capfd):
    folder = tmp_path / "kv"
    holder = DiskStore(folder, MANY, free_floor_bytes=0)
    with pytest.raises(StoreUnavailable, match="in use by another process"):
        open_storage(str(folder), MANY)
    store = open_storage(str(folder), MANY, must_answer=False)
    assert f"{folder} can't be used yet: {folder} is in use" in capfd.readouterr().err
    with pytest.raises(StoreUnavailable, match="in use"):
        store.put([item(1)], SECOND)
    assert "in use" in (store.stats().trouble or "")
    holder.close()
    store.put([item(1)], SECOND)
    assert payloads(store, [item(1)]) == [item(1).payload]
    assert store.stats().trouble is None
    store.close()


def test_opening_a_store_takes_no_longer_than_is_waited_for():
    may_open, store, opened = threading.Event(), Half(), []

    def open_when_told():
        opened.append(may_open.wait(10))
        return store

    store.close = threading.Event().set
    breaker = Breaker(open_when_told)
    for call in (lambda: breaker.contains([b""], 0.1), lambda: breaker.put([item(1)], 0.1)):
        with at_most(1), pytest.raises(StoreUnavailable, match=r"within 0.1 s"):
            call()
    asking = threading.Thread(target=lambda: breaker.contains([b""], 5 * SECOND))
    asking.start()
    may_open.set()
    assert breaker.contains([b""], SECOND) == [True]
    asking.join()
    assert opened == [True], "a folder would be in use by ourselves"
    breaker.close()


# -- names ------------------------------------------------------------------------------------------------


def test_a_key_depends_on_everything_before_its_end():
    seed, tokens = fingerprint({"model": "m"}), np.arange(18, dtype=np.int32)
    digests = chain(seed, tokens, 4)
    assert len(digests) == 4
    assert len(set(digests)) == 4
    assert chain(digests[1], tokens[8:], 4) == digests[2:]
    assert chain(seed, tokens.astype(np.int64), 4) == digests
    for at in range(16):
        other = tokens.copy()
        other[at] += 1
        same = [a == b for a, b in zip(digests, chain(seed, other, 4), strict=True)]
        assert same == [page < at // 4 for page in range(4)]
    assert not set(chain(fingerprint({"model": "n"}), tokens, 4)) & set(digests)
    full, window = ({key_in_group(one, fingerprint({"group": name})) for one in digests} for name in ("full", "window"))
    assert not full & window


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8))
def test_keys_that_are_computed_when_asked_for_are_the_same(asked):
    seed, tokens = fingerprint({"model": "m"}), np.arange(18, dtype=np.int32)
    keys, digests = KeyChain(seed, tokens, 4), chain(seed, tokens, 4)
    assert len(keys) == 4
    assert [keys[column] for column in asked] == [digests[column] for column in asked]


RECORDS = st.dictionaries(st.text(max_size=4), st.one_of(st.text(max_size=4), st.integers(), st.binary(max_size=4)))


@given(RECORDS, RECORDS)
def test_different_records_have_different_fingerprints(one, other):
    assert (fingerprint(one) == fingerprint(other)) == (one == other)


@pytest.mark.parametrize(("one", "other"), [
    ({"ab": "c"}, {"a": "bc"}), ({"a": "1"}, {"a": 1}), ({"a": "1"}, {"a": b"1"}), ({"a": "b", "c": "d"}, {"a": "bcd"}),
    ({"a": 1}, {"a": 1.0}), ({"a": ""}, {}),
])  # fmt: skip
def test_fields_are_tagged_with_their_type_and_length(one, other):
    assert fingerprint(one) != fingerprint(other)


def test_a_fingerprint_is_the_same_on_every_machine():
    expected = hashlib.sha256()
    for part in (b"a", b"int", b"1", b"b", b"str", "\u00fc".encode()):
        expected.update(len(part).to_bytes(8, "little") + part)
    assert fingerprint({"b": "\u00fc", "a": 1}) == expected.digest()


# -- locations --------------------------------------------------------------------------------------------


def test_a_location_names_the_kind_of_store(tmp_path, redis_server, monkeypatch):
    folder = open_store(str(tmp_path / "kv"))
    assert isinstance(folder, DiskStore)
    folder.close()
    assert isinstance(open_store(f"redis://127.0.0.1:{redis_server.port}/0"), RedisStore)
    monkeypatch.setitem(os.environ, "AWS_REGION", "us-east-1")
    assert isinstance(open_store("s3://bucket/some/prefix"), ObjectStore)
    with pytest.raises(ValueError, match="'ftp' is not a kind of store"):
        open_store("ftp://host/")


def test_libraries_of_stores_that_are_not_used_are_not_imported():
    code = "import sys, freehold.store.location, freehold.store.disk; print({'redis', 'obstore'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("location", "endpoint"),
    [
        ("s3://my bucket/kv", "http://127.0.0.1:9"),
        ("s3://bucket/kv", "127.0.0.1:9000"),
        ("s3://bucket/kv", "http://127.0.0.1:9999999"),
        ("s3://bucket/kv", "http://two words:9000"),
    ],
)
def test_an_address_that_can_not_be_is_said_when_a_store_is_opened(location, endpoint, monkeypatch):
    """The library panics in each request: what it raises is no Exception."""
    credentials = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
    for name, value in {**credentials, "AWS_ENDPOINT": endpoint}.items():
        monkeypatch.setitem(os.environ, name, value)
    with pytest.raises(ValueError, match=r"hicache_storage_location: s3://.*AWS_ENDPOINT"):
        open_storage(location, MANY, must_answer=False)
    store = open_store(location)
    for call in (lambda: store.contains([item(1).key], SECOND), lambda: store.put([item(1)], SECOND)):
        with pytest.raises(StoreUnavailable):
            call()
    store.close()


def test_a_bucket_that_is_not_there_is_said_when_a_store_is_opened(s3_server):
    open_storage("s3://bucket/kv", MANY).close()
    with pytest.raises(ValueError, match=r"hicache_storage_location: s3://none/kv: .*NoSuchBucket: "):
        open_storage("s3://none/kv", MANY)


def test_credentials_that_are_missing_are_named(monkeypatch):
    """The library then asks the cloud that it believes to run in, of which its message speaks alone."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delitem(os.environ, name, raising=False)
    store = ObjectStore("bucket", timeout=1)
    with pytest.raises((ValueError, StoreUnavailable), match="AWS_ACCESS_KEY_ID"):
        store.check(10 * SECOND)
    store.close()


@pytest.mark.parametrize("place", ["127.0.0.1:{port}/99999", ":secret@127.0.0.1:{port}/0", "127.0.0.1:port/0"])
def test_a_redis_that_refuses_is_said_when_a_store_is_opened(redis_server, place):
    location = f"redis://{place.format(port=redis_server.port)}"
    with pytest.raises(ValueError, match=f"hicache_storage_location: {location}"):
        open_storage(location, MANY, must_answer=False)


@pytest.mark.parametrize("location", ["redis://127.0.0.1:9/0", "s3://bucket/kv"])
def test_a_store_that_does_not_answer_may_come_later(location, monkeypatch, capfd):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.setitem(os.environ, name, "test")
    monkeypatch.setitem(os.environ, "AWS_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(StoreUnavailable):
        open_storage(location, MANY)
    open_storage(location, MANY, must_answer=False).close()
    assert f"{location} can't be used yet" in capfd.readouterr().err
