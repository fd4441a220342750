"""A store beside objects of others: whatever it does, they stay as they are, and people are told their names."""

import os
from pathlib import Path

import boto3
import pytest
import redis
from test_stores import MANY, SECOND, item

import commands
from freehold.store import object_store, upkeep
from freehold.store.disk import DiskStore
from freehold.store.entry import MAGIC, encode
from freehold.store.location import open_store
from freehold.store.object_store import ObjectStore
from freehold.store.redis_store import PREFIX, RedisStore

HEX = item(5).key.hex()


class Folder:
    """Files of others in the folder of a store."""

    def __init__(self, tmp_path: Path, request: pytest.FixtureRequest):
        self.root = tmp_path / "kv"
        self.location = str(self.root)
        self.root.mkdir()
        self.elsewhere = tmp_path / "elsewhere"  # links to a segment of another store
        self.elsewhere.write_bytes(b"".join(encode(*item(99))) + b"and more")
        for name in ("photo.jpg", "00000001-copy.kv", "7.kv", "000000002.kv", "00000003.txt", "00000004.kv", "ab.kv"):
            (self.root / name).write_bytes(b"of others " + name.encode())
        (self.root / "00000005.kv").symlink_to(self.elsewhere)
        (self.root / "00000006.kv").symlink_to(tmp_path / "nowhere")
        (self.root / "00000007.kv").mkdir()
        (self.root / "00000007.kv" / "letter").write_bytes(b"Dear reader")
        (self.root / "00000008.idx").symlink_to(self.elsewhere)
        (self.root / "00000009.tmp").symlink_to(self.elsewhere)
        (self.root / "album").mkdir()
        self._names = {path.name for path in self.root.iterdir()}
        self.named = {name for name in self._names if not name.endswith((".idx", ".tmp"))}

    def opened(self):
        return DiskStore(self.root, 30_000, free_floor_bytes=0, segment_bytes=4000)

    def seen(self):
        paths = [path for path in self.root.rglob("*") if path.relative_to(self.root).parts[0] in self._names]
        return {
            str(path): (
                os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None,
                path.lstat().st_mtime_ns if not path.is_dir() else 0,
            )
            for path in (*paths, self.elsewhere)
        }


class Redis:
    """Keys of others in the database of a store."""

    def __init__(self, tmp_path: Path, request: pytest.FixtureRequest):
        self.location = f"redis://127.0.0.1:{request.getfixturevalue('redis_server').port}/0"
        self._client = redis.Redis.from_url(self.location)
        ours = [b"sessions", b"x" * 31, b"x" * 33, b"", b"*" * 40]
        for name in (b"photo", bytes(32), *(PREFIX + one for one in ours)):
            self._client.set(name, b"of others")
        self._client.rpush(PREFIX + b"y" * 32, "a", "list")
        self._names = set(self._client.keys())
        self.named = {
            name[len(PREFIX) :].decode()
            for name in self._names
            if name.startswith(PREFIX) and name != PREFIX
        } | {""}  # fmt: skip

    def opened(self):
        return RedisStore(self.location, MANY)

    def seen(self):
        return {name: (self._client.dump(name), self._client.ttl(name)) for name in self._names}


class Bucket:
    """Objects of others in the bucket of a store."""

    PREFIX = "kv/"

    def __init__(self, tmp_path: Path, request: pytest.FixtureRequest):
        server = request.getfixturevalue("s3_server")
        self.location = f"s3://bucket/{self.PREFIX}".rstrip("/")
        self._client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{server.port}")
        inside = ["photo.jpg", "ab/photo.jpg", f"ab/{HEX}", f"05/{HEX}.jpg", f"{HEX}", f"x/{HEX[:2]}/{HEX}", "05/"]
        for name in ("photo.jpg", "kv2/photo.jpg", f"{HEX[:2]}/{HEX}", *(self._prefix() + one for one in inside)):
            self._client.put_object(Bucket="bucket", Key=name, Body=b"of others")
        self._names = set(self._listed())
        self.named = {one.rstrip("/") for one in inside}

    def _prefix(self) -> str:
        return self.PREFIX

    def _listed(self):
        return [one["Key"] for one in self._client.list_objects_v2(Bucket="bucket")["Contents"]]

    def opened(self):
        return open_store(self.location)

    def seen(self):
        return {
            name: (got["Body"].read(), got["LastModified"])
            for name in self._names
            for got in [self._client.get_object(Bucket="bucket", Key=name)]
        }


class WholeBucket(Bucket):
    """A location without a prefix: the store takes one."""

    PREFIX = ""

    def _prefix(self) -> str:
        return "freehold/"


@pytest.fixture(params=[Folder, Redis, Bucket, WholeBucket], ids=lambda place: place.__name__)
def place(request, tmp_path):
    return request.param(tmp_path, request)


def test_what_others_keep_beside_entries_is_never_touched(place, tmp_path, monkeypatch):
    monkeypatch.setattr(object_store, "BYTES", object_store.BYTES[:64])  # of the keys here: each is listed
    before = place.seen()
    items = [item(n) for n in range(60)]

    def after(what) -> None:
        assert place.seen() == before, what

    store = place.opened()
    after("opening")
    store.put(items, 10 * SECOND)
    after("writing")
    list(store.get([one.key for one in items], 10 * SECOND))
    store.contains([one.key for one in items], 10 * SECOND)
    after("reading")
    assert set(store.all_keys()) <= {one.key for one in items}
    assert len(list(upkeep.examine(store))) > 20
    after("listing")
    assert upkeep.prune(store) == (0, 0)
    upkeep.export(store, tmp_path / "all")
    after("looking after it")
    store.discard([one.key for one in items[:30]])
    after("giving up")
    store.close()
    after("closing")
    store = place.opened()
    after("opening again")
    assert {name.rpartition("freehold:")[2] for name in store.foreign()} == place.named
    store.clear(10 * SECOND)
    assert not list(store.all_keys())
    after("clearing")
    store.put(items, 10 * SECOND)
    store.clear(10 * SECOND)
    after("clearing what was written since")
    store.close()
    after("closing again")


def test_what_is_foreign_is_counted_and_named(place):
    store = place.opened()
    store.put([item(1)], SECOND)
    store.close()
    code, said = commands.run("cache", "ls", place.location)
    assert code == 0
    assert f"{len(place.named)} foreign" in said
    for name in place.named:
        assert name in said


def test_a_name_that_the_library_can_not_read_stops_no_clearing(s3_server):
    client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{s3_server.port}")
    for name in ("kv/../up", "kv//twice", "up/../x"):
        client.put_object(Bucket="bucket", Key=name, Body=b"of others")
    store = ObjectStore("bucket", "kv")
    store.put([item(1)], SECOND)
    store.clear(10 * SECOND)
    assert not list(store.all_keys())
    assert any(".." in name for name in store.foreign())
    store.close()
    assert len(client.list_objects_v2(Bucket="bucket")["Contents"]) == 3


@pytest.mark.parametrize("content", [b"", MAGIC[:3], MAGIC + bytes(80)])
def test_a_segment_without_an_entry_is_ours(tmp_path, content):
    """A process was killed while it wrote the first."""
    (tmp_path / "00000001.kv").write_bytes(content)
    store = DiskStore(tmp_path, MANY, free_floor_bytes=0)
    assert not list(store.foreign())
    store.close()
    assert not (tmp_path / "00000001.kv").exists()
