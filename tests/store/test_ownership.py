"""Whose memory it is: a store reads and writes host pages only as long as their order goes on."""

import contextlib
import threading
import time

import numpy as np
import pytest

from freehold.contract.orders import Kind, Order
from freehold.engine import storage_io
from freehold.engine.storage_io import StorageIO
from freehold.store import disk, object_store, redis_store
from freehold.store.disk import DiskStore
from freehold.store.object_store import ObjectStore
from freehold.store.redis_store import RedisStore
from freehold.store.store import Item, StoreUnavailable


@pytest.mark.parametrize("place", ["disk", "redis", "s3"])
def test_a_store_touches_no_page_of_an_order_that_has_ended(place, request, tmp_path):
    """Pages are overwritten when their order has been reported, as by the next order that owns them. Encoding and
    decoding are slow, so that each deadline passes in the midst of the pages."""
    count = 24
    content = np.random.default_rng(0).integers(0, 256, (count + 1, 64), np.uint8)
    host, pages = content.copy(), [np.arange(1, count + 1, dtype=np.int32)]
    keys = [[bytes([n]) * 32 for n in range(count)]]
    store = opened(place, request, tmp_path)

    def run(io, kind):
        """-> which pages have arrived, and what was theirs then."""
        order, ended = Order(1, kind, pages, keys=keys), threading.Event()
        whole = [np.zeros(count, np.bool_)]
        then = np.zeros_like(host)

        def work(move):
            with contextlib.suppress(StoreUnavailable):
                whole[:] = move(order)
            then[:] = host
            host[:] = 0xEE
            ended.set()

        io.begin(order, work)
        assert ended.wait(10)
        return whole[0], then

    with slowly("encode"):
        io = StorageIO(store, [host])
        run(io, Kind.STORE)
        io.close()
    assert (host == 0xEE).all()
    store = opened(place, request, tmp_path)
    for key, payload, expected in zip(keys[0], store.get(keys[0], 10), content[1:], strict=True):
        assert payload is None or bytes(payload) == expected.tobytes(), key
    store.put([Item(key, b"", page.data) for key, page in zip(keys[0], content[1:], strict=True)], 10)
    with slowly("decode"):
        io = StorageIO(store, [host])
        whole, then = run(io, Kind.FETCH)
        io.close()
    assert (then[1:][whole] == content[1:][whole]).all()
    assert (host == 0xEE).all()


def opened(place, request, tmp_path):
    if place == "disk":
        return DiskStore(tmp_path, 1 << 30, free_floor_bytes=0)
    if place == "redis":
        return RedisStore(f"redis://127.0.0.1:{request.getfixturevalue('redis_server').port}/0", 1 << 40)
    request.getfixturevalue("s3_server")
    return ObjectStore("bucket")


@contextlib.contextmanager
def slowly(name):
    """A function of `entry.py` waits before it begins, and deadlines are short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage_io, "STORE_DEADLINE_S", 0.1)
        patch.setattr(storage_io, "FETCH_DEADLINE_S", 0.1)
        for module in (disk, redis_store, object_store):
            real = getattr(module, name)
            patch.setattr(module, name, lambda *arguments, real=real: time.sleep(0.02) or real(*arguments))
        yield
