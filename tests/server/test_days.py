"""A day in ten minutes, and a hundred kills, with each kind of store behind the host."""

import asyncio
import os

import pytest
from behind import KINDS, put_behind
from day import DEVICE, HOST, LIMIT, PAGE_BYTES, STORAGE, TIERS, Day, pages_needed
from jumping_clock import JumpingClock
from kill_storm import KillStorm
from killing import KilledServer

from commands import run
from store_servers import redis_server, s3_server

__all__ = ["redis_server", "s3_server"]
SECONDS = float(os.environ.get("FREEHOLD_DAY_SECONDS", "600"))
CONVERSATIONS = max(int(SECONDS / 3), 60)
KILLS = int(os.environ.get("FREEHOLD_KILLS", "100"))
STORED = 256 << 20  # bytes of storage while processes are killed
SHARE = 0.9  # of the tokens that the model finds


@pytest.fixture
def store(request):
    """The process behind `kind`, None for a folder."""
    kind = request.getfixturevalue("kind")
    return None if kind == "file" else request.getfixturevalue(f"{kind}_server")


@pytest.mark.soak
@pytest.mark.timeout(2 * SECONDS + 300)
@pytest.mark.parametrize("kind", KINDS)
def test_a_day(kind, store, tmp_path, monkeypatch):
    """Storage gets what the host has, so that it survives: of different pages all tiers have hardly more than the
    largest."""
    need = pages_needed(CONVERSATIONS)
    device, host, storage = (int(share * need) for share in (DEVICE, HOST, STORAGE))
    behind = put_behind(kind, tmp_path, storage * PAGE_BYTES, store)
    clock = JumpingClock(tmp_path)
    for name, value in clock.environment.items():
        monkeypatch.setenv(name, value)
    server = KilledServer(
        *behind.flags, "--num-pages", str(device), "--hicache-ratio", str(HOST / DEVICE), "--max-model-len", str(LIMIT),
    )  # fmt: skip
    try:
        day = Day(server, behind, clock, SECONDS, CONVERSATIONS, tuple(SECONDS * at for at in (0.3, 0.6, 0.8)))
        asyncio.run(day.pass_by())
        share = day.report(*((storage, device + host + storage) if behind.is_bounded else (None, None)))
        print(f"{kind}: {day.outages} outages; after restarts: {day.found_after}")
        server.end()
    finally:
        server.destroy()
    assert len(day.found_after) == 3
    for tiers in day.found_after:
        assert all(set(one) <= set(TIERS) and one.get("host", 0) + one.get("storage", 0) > 0 for one in tiers), tiers
    assert share >= SHARE


@pytest.mark.soak
@pytest.mark.timeout(60 * KILLS + 300)
@pytest.mark.parametrize("kind", KINDS)
def test_kills_with_each_store(kind, store, tmp_path):
    behind = put_behind(kind, tmp_path, STORED, store)
    server = KilledServer(
        *behind.flags, "--num-pages", "64", "--hicache-ratio", "1.5", "--max-model-len", "400",
        "--max-restarts", "1000", "--hicache-storage-prefetch-policy", "wait_complete",
        "--session-store", str(tmp_path / "sessions.db"),
    )  # fmt: skip
    storm = KillStorm(server, KILLS)
    try:
        asyncio.run(storm.rage())
        server.end()
    finally:
        server.destroy()
        print(f"{kind}: {server.kills} kills, {dict(storm.tally)}")
    code, said = run("cache", "verify", behind.location)
    assert code == 0, said
    assert storm.tally["answers"] > KILLS
    assert storm.tally["storage"] > 0
