"""The gains and costs of tiers below the device, beside none, and beside plain copies of the same bytes."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from freehold.bench.scheduler import decode_step_us
from freehold.contract.orders import Kind, Order, Outcome
from freehold.contract.sampling_params import SamplingParams
from freehold.engine.cpu.caches import GroupCache
from freehold.engine.cpu.page_bytes import PageBytes
from freehold.engine.page_mover import PageMover
from freehold.llm import LLM
from freehold.memory import Memory, MemoryShape, TierPlan
from freehold.models.spec import CacheLayout, KVCache
from freehold.scheduler.request import Request
from freehold.store.disk import DiskStore
from freehold.store.store import Item

OUTPUT = 16
GREEDY = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
COPIED_PAGES = 256
ROUNDS = 7
CONVERSATIONS, FIRST_TOKENS, TURN_TOKENS, TURNS = 16, 400, 40, 4
DEVICE_PAGES = CONVERSATIONS * (FIRST_TOKENS + TURNS * (TURN_TOKENS + OUTPUT)) // 16 // 4
MISSES = 12
SECONDS = 60.0


@dataclass(frozen=True)
class Result:
    """A ratio to what it is compared with, and its minimum goal (or, with `is_most`, its maximum)."""

    name: str
    ours: str
    theirs: str
    ratio: float
    goal: float
    is_most: bool = False

    @property
    def is_met(self) -> bool:
        return self.ratio <= self.goal if self.is_most else self.ratio >= self.goal


def run_tiers() -> int:
    """Print ratios. Return exit code 0 if the goals are met."""
    console = Console()
    results: list[Result] = []
    for what, measure in (
        ("copies to the host", _host_copies), ("a disk", _disk), ("conversations", _conversations),
        ("prompts without hits", _misses), ("the scheduler's step", _scheduler_step),
    ):  # fmt: skip
        with console.status(f"Measuring {what} ..."):
            results += measure()
    table = Table("what", "with tiers", "compared with", "ratio", "goal", title="Tiers")
    for one in results:
        bound = "at most" if one.is_most else "at least"
        table.add_row(one.name, one.ours, one.theirs, f"{one.ratio:.2f} x", f"{bound} {one.goal:g} x")
    console.print(table)
    return 0 if all(one.is_met for one in results) else 1


def _tiered(**options: object) -> LLM:
    return LLM(enable_hierarchical_cache=True, **options)  # pyright: ignore[reportArgumentType]


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _in_turns(*runs: Callable[[], object]) -> list[float]:
    """Return median seconds of each, interleaved, after one round to warm up."""
    series: list[list[float]] = [[] for _ in runs]
    for number in range(ROUNDS + 1):
        for one, seconds in zip(runs, series, strict=True):
            measured = _seconds(one)
            if number:
                seconds.append(measured)
    return [statistics.median(seconds) for seconds in series]


# -- copies -------------------------------------------------------------------------------------------


def _host_copies() -> list[Result]:
    """Measure the scheduler's copy orders, beside a copy of as many contiguous bytes."""
    with _tiered(num_pages=2 * COPIED_PAGES, hicache_ratio=1.0) as llm:
        mover = llm.mover
        assert mover is not None
        size = mover.host[0].shape[1]
        rng = np.random.default_rng(0)
        device, host = (rng.permutation(2 * COPIED_PAGES)[:COPIED_PAGES].astype(np.int32) + 1 for _ in range(2))
        source, target = (np.ones((COPIED_PAGES, size), np.uint8) for _ in range(2))

        def copy(kind: Kind) -> None:
            ended: list[Outcome] = []
            mover.begin(Order(1, kind, [host], [device], [[b""] * COPIED_PAGES]), ended.append)
            while not ended:
                mover.wait(SECONDS)

        backup, load, plain = _in_turns(
            lambda: copy(Kind.BACKUP), lambda: copy(Kind.LOAD), lambda: np.copyto(target, source)
        )
    moved = COPIED_PAGES * size / 1e9
    rates = [f"{moved / seconds:.1f} GB/s" for seconds in (backup, load, plain)]
    return [
        Result(f"copy of {COPIED_PAGES} pages to the host", rates[0], f"{rates[2]} memcpy", plain / backup, 0.8),
        Result("and back", rates[1], f"{rates[2]} memcpy", plain / load, 0.8),
    ]


def _disk() -> list[Result]:
    """Measure entries of one page each, beside `dd` with blocks of a page."""
    size, count = 16 * 23_040, 256
    folder = Path(tempfile.mkdtemp())
    rng = np.random.default_rng(0)
    items = [Item(rng.bytes(32), b"", rng.bytes(size)) for _ in range(count)]
    raw = folder / "source"
    raw.write_bytes(b"".join(bytes(item.payload) for item in items))
    try:
        store = DiskStore(folder / "kv", 1 << 40, free_floor_bytes=0)

        def write() -> None:
            store.put(items, SECONDS)
            store.clear(SECONDS)

        def dd(source: Path | str, target: Path | str) -> None:
            command = ["dd", f"if={source}", f"of={target}", f"bs={size}", f"count={count}", "conv=notrunc"]
            subprocess.run(command, check=True, capture_output=True)
            if target != "/dev/null":
                Path(target).unlink()

        ours, theirs = _in_turns(write, lambda: dd(raw, folder / "copy"))
        store.put(items, SECONDS)
        keys = [item.key for item in items]
        read, dd_read = _in_turns(lambda: deque(store.get(keys, SECONDS), maxlen=0), lambda: dd(raw, "/dev/null"))
        store.close()
    finally:
        shutil.rmtree(folder)
    moved = size * count / 1e9
    rates = [f"{moved / seconds:.2f} GB/s" for seconds in (ours, theirs, read, dd_read)]
    return [
        Result("entries written to a disk", rates[0], f"{rates[1]} dd", theirs / ours, 0.7),
        Result("entries read and checked", rates[2], f"{rates[3]} dd", dd_read / read, 0.7),
    ]


# -- whole engines ------------------------------------------------------------------------------------


def _conversations() -> list[Result]:
    """Measure conversations, with four times as much history as the device holds."""
    options = {"num_pages": DEVICE_PAGES, "max_running_requests": 4}
    with LLM(**options) as plain, _tiered(hicache_ratio=8.0, **options) as tiered:  # pyright: ignore[reportArgumentType]
        slow, fast = _first_token_seconds(plain), _first_token_seconds(tiered)
    rates = [f"{1000 * seconds:.0f} ms" for seconds in (fast, slow)]
    return [Result("first token of later turns, 4 x the device's memory", rates[0], rates[1], slow / fast, 3.0)]


def _first_token_seconds(llm: LLM) -> float:
    """Return the median of all turns but the first."""
    rng = np.random.default_rng(1)
    histories = [rng.integers(1000, 40_000, FIRST_TOKENS).tolist() for _ in range(CONVERSATIONS)]
    found: list[float] = []
    for turn in range(TURNS):
        for number, history in enumerate(histories):
            history += rng.integers(1000, 40_000, TURN_TOKENS).tolist()
            request = Request(f"c{number}-{turn}", np.array(history, np.int32), GREEDY, session=f"s{number}")
            started = time.perf_counter()
            llm.scheduler.add(request)
            while request.first_token is None:
                llm.scheduler.step()
            found += [time.perf_counter() - started] if turn else []
            while llm.scheduler.has_work:
                llm.scheduler.step()
            history += request.output.tolist()
    return statistics.median(found)


def _misses() -> list[Result]:
    """Measure prompts that share nothing: for them, tiers are pure overhead."""
    rng = np.random.default_rng(2)

    def run(llm: LLM) -> None:
        prompts = [rng.integers(1000, 40_000, 256).tolist() for _ in range(MISSES)]
        llm.generate(prompts, replace(GREEDY, max_tokens=32))

    options = {"num_pages": 400, "max_running_requests": MISSES}
    with LLM(**options) as plain, _tiered(hicache_ratio=4.0, **options) as tiered:  # pyright: ignore[reportArgumentType]
        with_tiers, without = _in_turns(lambda: run(tiered), lambda: run(plain))
    tokens = MISSES * (256 + 32)
    rates = [f"{tokens / seconds:.0f} tokens/s" for seconds in (with_tiers, without)]
    return [Result("throughput without any hit", rates[0], rates[1], without / with_tiers, 0.97)]


def _scheduler_step() -> list[Result]:
    """Measure the median time of an iteration with 64 rows, with and without concurrent page copies."""
    layout = CacheLayout(None, False, False, tuple((i, 0) for i in range(30)), (KVCache(3, 64, 64),) * 30)
    pages = PageBytes(GroupCache(layout, COPIED_PAGES, 16, "bfloat16"))
    mover = PageMover([pages], [COPIED_PAGES])
    copied = [np.arange(1, 65, dtype=np.int32)]
    in_flight: list[bool] = []

    def copy(outcome: Outcome | None = None) -> None:
        in_flight[:] = [outcome is None]

    def keep_copying() -> None:
        if not any(in_flight):
            copy()
            mover.begin(Order(1, Kind.BACKUP, copied, copied, [[b""] * 64]), copy)

    def with_tiers(shape: MemoryShape) -> Memory:
        return Memory(shape, TierPlan((COPIED_PAGES,), (pages.page_bytes,), (b"",), b""), mover)

    ours, theirs = (list[float]() for _ in range(2))
    for _ in range(ROUNDS):
        theirs.append(decode_step_us(64))
        ours.append(decode_step_us(64, memory_of=with_tiers, before=keep_copying))
    mover.shutdown()
    with_copies, without = statistics.median(ours), statistics.median(theirs)
    texts = [f"{each:.0f} us" for each in (with_copies, without)]
    return [
        Result("scheduler's step with copies in flight", texts[0], texts[1], with_copies / without, 1.1, is_most=True)
    ]
