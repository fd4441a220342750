"""The simulator runs clean, repeats itself, finds planted bugs and shrinks what it found."""

import io
import itertools
import json
import math
import random
import subprocess
import sys
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from freehold.config import EngineConfig
from freehold.memory.ledger.epochs import Epochs
from freehold.planning.replay import Speed, replay
from freehold.planning.trace import read_trace
from freehold.simulation import command
from freehold.simulation.groups import GROUPS
from freehold.simulation.happenings import Happening, Verb
from freehold.simulation.runs import jobs_for, run_many, uncovered
from freehold.simulation.scenario import AXES, Cell, Scenario, diagonal, matrix
from freehold.simulation.shrink import shrink
from freehold.simulation.world import Violation, World

CELL = Cell(True, 4, "ngram", "fcfs", "tight")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("part", range(10))
def test_a_part_of_the_diagonal_of_the_matrix(part):
    """Every combination of the first axes once; `freehold simulate --matrix` takes all cells, and more seeds."""
    cells = list(diagonal())[part::10]
    *_, tally = run_many(jobs_for(7_100, 1, None, cells), processes=1)
    assert tally.violation is None, tally.violation
    assert tally.scenarios == len(cells)
    assert tally.steps > 1_000
    assert tally.retractions > 10


@pytest.mark.thorough
def test_the_diagonal_reaches_every_change_of_state():
    cells = list(diagonal())
    *_, tally = run_many(jobs_for(7_200, 1, None, cells), processes=1)
    assert len({cell.groups for cell in cells}) == len(GROUPS)
    assert tally.violation is None, tally.violation
    assert not uncovered(tally.cover)


def test_a_short_part_of_the_matrix_has_something_of_every_axis():
    cells = list(matrix())
    assert len(set(cells)) == len(cells) == math.prod(map(len, AXES))
    for values, axis in zip(zip(*map(astuple, cells[:42]), strict=True), AXES, strict=True):
        assert all(values.count(value) >= 42 // len(axis) - 1 for value in axis)


def test_time_bounds_the_first_seeds_too(monkeypatch):
    times = itertools.count()
    monkeypatch.setattr("freehold.simulation.runs.time.monotonic", lambda: next(times))
    assert len(list(jobs_for(0, 3, 5.0))) == 4
    assert len(list(jobs_for(0, 1, 1000.0, [CELL]))) == 999, "and then goes on with fresh ones"


def test_progress_that_is_not_shown_is_written_now_and_then(monkeypatch):
    said, now = io.StringIO(), [0.0]
    monkeypatch.setattr(command, "console", Console(file=said))
    monkeypatch.setattr("freehold.simulation.command.time.monotonic", lambda: now[0])
    say = command.Lines()
    for at in (1, 11, 12, 22):
        now[0] = float(at)
        say(f"at {at}")
    assert said.getvalue() == "at 11\nat 22\n"


def test_branches_of_a_folder_without_data_are_an_error(tmp_path):
    script = Path(__file__).parent / "branches.py"
    for arguments, code in ((["--help"], 0), ([str(tmp_path)], 2), ([str(tmp_path / "nope")], 2)):
        done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, check=False)
        assert (done.returncode, bool(done.stdout + done.stderr)) == (code, True)


@pytest.mark.thorough
def test_several_processes_stop_when_the_time_is_up():
    *_, tally = run_many(jobs_for(9_000, 0, 1.0), processes=2)
    assert 0 < tally.scenarios < len(list(matrix()))
    assert tally.violation is None


def test_a_seed_repeats_itself():
    runs = [World(Scenario.generate(CELL, seed)).run() for seed in (1, 1, 2)]
    assert runs[0].log_hash == runs[1].log_hash != runs[2].log_hash
    assert runs[0] == runs[1]


@pytest.mark.parametrize("seed", [1, 2])
def test_what_an_operator_only_looks_at_changes_nothing(seed):
    """Without the questions, the log is the same."""
    scenario = Scenario.generate(CELL, seed)
    asked = [Happening(at, Verb.EXPLAIN, {"id": f"r{at % 32}"}) for at in range(1, 200, 7)]
    asked += [Happening(at, Verb.RECOUNT) for at in range(3, 200, 30)]
    rest = [one for one in scenario.happenings if one.verb not in (Verb.EXPLAIN, Verb.RECOUNT)]
    runs = [World(replace(scenario, happenings=[*rest, *more])).run() for more in ([], asked)]
    assert runs[0].log_hash == runs[1].log_hash


def test_a_scenario_survives_json():
    scenario = Scenario.generate(CELL, 3)
    assert Scenario.from_json(scenario.to_json()) == scenario
    assert Cell.parse(str(CELL)) == CELL
    with pytest.raises(ValueError, match="cell"):
        Cell.parse("overlap:3:ngram:fcfs:tight")


def test_a_planted_bug_is_found_explained_and_shrunk(monkeypatch):
    """Pages are free at once, although a step in flight still writes them."""
    monkeypatch.setattr(Epochs, "passed", lambda epochs, fence: True)
    found = None
    for seed in range(10):
        try:
            World(Scenario.generate(CELL, seed)).run()
        except Violation as violation:
            found = violation
            if "page" in str(found):
                break
    assert found is not None
    assert f"seed {found.scenario.seed}" in str(found)
    assert "page" in str(found)
    smallest = shrink(found, runs_max=60)
    assert type(smallest.cause) is type(found.cause)
    assert len(smallest.scenario.happenings) < len(found.scenario.happenings) / 2
    with pytest.raises(Violation):
        World(Scenario.from_json(smallest.scenario.to_json())).run()


def run_steps(world: World, count: int) -> None:
    for _ in range(count):
        world.scheduler.step()


def submit(at: int, name: str, **fields) -> Happening:
    defaults = {
        "id": name, "prompt": list(range(30)), "max_tokens": 20, "min_tokens": 0, "ignore_eos": True, "stop": [],
        "stop_token_ids": [], "namespace": "", "priority": 0, "timeout": None, "session": None,
    }  # fmt: skip
    return Happening(at, Verb.SUBMIT, {**defaults, **fields})


@pytest.mark.parametrize("state", ["waiting", "prefilling", "running"])
def test_a_scripted_abort_in_each_state(state):
    happenings = [
        submit(0, "a", prompt=list(range(200))),
        submit(0, "b", prompt=list(range(500, 700))),
        Happening(0, Verb.ABORT, {"id": "b", "state": state}),
    ]
    world = World(Scenario(CELL, 0, happenings, chunk=7))
    world.run()
    assert world.requests["b"].finish.kind == "abort"
    assert state in {passed.value for passed, _ in world.requests["b"].transitions}
    assert len(world.requests["a"].output) == 20


def test_a_request_that_cannot_go_on_ends_and_the_rest_goes_on_after_pages_return():
    happenings = [
        submit(0, "a", max_tokens=60),
        Happening(4, Verb.EXHAUST, {"leaving": 0, "iterations": 36}),
        submit(41, "b"),
    ]
    world = World(Scenario(CELL, 0, happenings))
    world.run()
    assert world.requests["a"].finish.kind == "error"
    assert "KV memory" in world.requests["a"].finish.message
    assert world.requests["b"].finish.kind == "length"


def test_a_lost_completion_is_told_and_nothing_is_freed():
    """The engine never answers: the scheduler says what it waits for, and keeps the pages."""
    world = World(Scenario(CELL, 0, [submit(0, "a")]))
    world.engine.hold = True
    world._apply(world._pending.pop())
    run_steps(world, 5)
    assert world.scheduler.stuck is None
    world.clock.now += world.config.watchdog_timeout + 1
    run_steps(world, 1)
    assert "waiting for the engine to complete step 1" in str(world.scheduler.stuck)
    world.scheduler.abort("a")
    assert [request.id for request in world.scheduler.step().ended] == ["a"], "it hears of that at once"
    world.memory.audit()
    counts = world.memory.counts()
    assert counts.limbo > 0, "what the lost step may touch is not free"
    world.engine.hold = False
    world.engine.release()
    while world.scheduler.has_work:
        world.scheduler.step()
    assert world.memory.counts().limbo == 0


def test_waiting_forever_is_noticed():
    """All pages are gone for good and nobody runs: stuck, in words."""
    world = World(Scenario(CELL, 0, [submit(0, "a")]))
    world._exhaust(0)
    world._apply(world._pending.pop())
    run_steps(world, 300)
    assert "waiting for room for request 'a' of 30 tokens" in str(world.scheduler.stuck)
    world._restore()
    while world.scheduler.has_work:
        world.scheduler.step()
    assert world.requests["a"].finish.kind == "length"


def test_in_place_pause_keeps_leases_and_new_weights_are_never_mixed_into_the_cache():
    happenings = [
        submit(0, "a", max_tokens=60, prompt=list(range(64))),
        Happening(10, Verb.PAUSE, {"mode": "in_place"}),
        Happening(11, Verb.WEIGHTS),
        submit(12, "b", prompt=list(range(64))),
        Happening(13, Verb.RESUME),
    ]
    world = World(Scenario(replace(CELL, pool="ample"), 0, happenings))
    world.run()
    assert world.requests["a"].retractions == 0
    assert world.requests["b"].cached_tokens == 0, "the old weights' prefix was hit"


def test_mooncake_trace(tmp_path):
    """Two rounds over the same blocks: the second is all hits but for the last token's page."""
    path = tmp_path / "trace.jsonl"
    rows = [
        {
            "timestamp": 1000 * i,
            "input_length": 2048,
            "output_length": 64,
            "hash_ids": [4 * (i % 8) + j for j in range(4)],
        }
        for i in range(16)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arrivals = read_trace(path, scale=32)
    assert len(arrivals) == 16
    assert all(len(arrival.prompt) == 64 for arrival in arrivals)
    config = EngineConfig(page_size=16, num_pages=400, max_running_requests=8)
    result = replay(arrivals, config, Speed())
    assert result.requests == 16
    assert result.cached_tokens == 8 * 48
    small = replay(arrivals, replace(config, num_pages=12), Speed())
    assert small.cached_tokens < result.cached_tokens
    assert small.evicted_pages > 0


def test_session_and_azure_traces(tmp_path):
    session = tmp_path / "sessions.jsonl"
    turns = [{"t": 5.0 * i, "in": 64 * (i + 2), "out": 64, "hash_ids": list(range(i + 2))} for i in range(4)]
    row = {
        "requests": [
            *turns,
            {"type": "subagent", "t": 1.0, "requests": [{"t": 0.5, "in": 64, "out": 8, "hash_ids": [0]}]},
        ]
    }
    session.write_text(json.dumps(row) + "\n")
    arrivals = read_trace(session, scale=4)
    start = arrivals[0].at
    assert 0 <= start < 4 * 3600
    assert [arrival.at - start for arrival in arrivals] == pytest.approx([0.0, 1.5, 5.0, 10.0, 15.0])
    assert np.array_equal(arrivals[-1].prompt[:32], arrivals[0].prompt)
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n"
    )
    arrivals = read_trace(azure, scale=4)
    assert [len(arrival.prompt) for arrival in arrivals] == [1202, 795]
    assert abs(arrivals[1].at - 0.052) < 1e-3


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.jsonl", '{"a": 1}', "input_length"),
        ("a.jsonl", '{"timestamp": 1, "input_length": 9, "hash_ids": []}', "output_length"),
        ("a.jsonl", '{"requests": [{"in": 4}]}', "out"),
        ("a.jsonl", "7", "not iterable"),
        ("a.jsonl", "seven", "Expecting value"),
        ("a.csv", "a,b\n1,2", "TIMESTAMP"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nnow,1,2", "isoformat"),
    ],
)
def test_a_trace_of_another_format_is_refused_with_what_is_missing(tmp_path, name, text, said):
    (tmp_path / name).write_text(text + "\n")
    with pytest.raises(ValueError, match=rf"an unknown format \(.*{said}.*\). A trace has"):
        read_trace(tmp_path / name, 1)
    (tmp_path / name).write_text("")
    with pytest.raises(ValueError, match="has no requests"):
        read_trace(tmp_path / name, 1)


def test_generated_scenarios_differ():
    seeds = random.Random(0).sample(range(1000), 5)
    assert len({Scenario.generate(CELL, seed).to_json() for seed in seeds}) == 5
