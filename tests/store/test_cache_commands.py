"""`freehold cache` on a folder and a Redis, as a user runs it."""

import pytest
from test_stores import MANY, item, payloads

import commands
from freehold.store.disk import DiskStore
from freehold.store.location import open_store


def run(*arguments) -> tuple[int, str]:
    code, said = commands.run("cache", *arguments)
    return code, " ".join(said.split())


@pytest.fixture
def folder(tmp_path):
    store = DiskStore(tmp_path / "kv", MANY, free_floor_bytes=0)
    store.put([item(n)._replace(about=b'{"group": "full"}') for n in range(5)], 1)
    store.close()
    return tmp_path / "kv"


def damage(folder, number: int) -> None:
    """One bit of the payload of an entry."""
    reader = DiskStore(folder, MANY, is_read_only=True)
    segment, entry = reader._of(reader._index[item(number).key])
    place, path = segment.place(entry), segment.path
    reader.close()
    raw = bytearray(path.read_bytes())
    raw[place.offset + place.size - 1] ^= 1
    path.write_bytes(raw)


def test_listing_and_counting(folder):
    code, output = run("ls", folder)
    assert (code, output.count('{"group": "full"}')) == (0, 5)
    assert run("ls", folder, "--limit", "2")[1].count("full") == 2
    code, output = run("stats", folder)
    assert code == 0
    assert output.startswith("5 entries, 1.9 kB")


def test_verifying_and_pruning(folder):
    assert run("verify", folder) == (0, "5 entries are whole, 0 are damaged")
    damage(folder, 3)
    code, output = run("verify", folder)
    assert code == 1
    assert item(3).key.hex() in output
    assert output.endswith("4 entries are whole, 1 are damaged")
    assert run("prune", folder)[1].startswith("deleted 1 entries")
    assert run("verify", folder) == (0, "4 entries are whole, 0 are damaged")


def test_a_copy_through_a_file(folder, tmp_path, redis_server):
    damage(folder, 2)
    assert run("export", folder, tmp_path / "all")[0] == 0
    location = f"redis://127.0.0.1:{redis_server.port}/0"
    code, output = run("import", location, tmp_path / "all")
    assert (code, output) == (0, "4 of 4 entries are stored")
    store = open_store(location)
    assert payloads(store, [item(1), item(2)]) == [item(1).payload, None]
    store.close()
    raw = (tmp_path / "all").read_bytes()
    (tmp_path / "all").write_bytes(raw[:-1])
    code, output = run("import", tmp_path / "other", tmp_path / "all")
    assert code == 1
    assert "cut short" in output


def test_what_is_wrong_is_said(folder, tmp_path):
    holder = DiskStore(folder, MANY, free_floor_bytes=0)
    code, output = run("prune", folder)
    assert code == 1
    assert "in use by another process" in output
    assert run("verify", folder)[0] == 0, "reading is allowed"
    holder.close()
    code, output = run("ls", "ftp://host")
    assert code == 1
    assert "not a kind of store" in output
    code, output = run("ls", tmp_path / "nope")
    assert (code, "no such folder" in output) == (1, True)
    assert not (tmp_path / "nope").exists()
    code, output = run("ls", "redis://127.0.0.1:1/0")
    assert code == 1
    assert "redis" in output
