"""The protocol of the team's threads, with one access to shared words at a time.

The team's functions run as Python. Before each access the test may stop the thread for a while, as the system does when
another process gets its core. The order of accesses is chosen by the test, so a failure can be repeated.
"""

import itertools
import random
import threading
from collections.abc import Callable

import pytest

from freehold.engine.cpu import team

STEPS_MAX, NO_WORD = 100_000, -1
FIRST_ADDRESS = 1 << 40


class Ended(Exception):
    """The simulation has ended."""


class Turns:
    """Threads of which one runs at a time: the same one until it sleeps, unless `interrupt(word)` says, before it reads
    or writes a word, for how many accesses of others it stands still. `choose`: who goes on then."""

    def __init__(self, interrupt: Callable[[int], int], choose: Callable[[list[int]], int]):
        self.interrupt, self.choose = interrupt, choose
        self.gates: list[threading.Semaphore] = []
        self.asleep: dict[int, int] = {}  # threads, and the word that each waits for
        self.still: dict[int, int] = {}  # threads, and until which step they stand still
        self.current, self.steps, self.failure = 0, 0, ""

    def step(self, word: int = NO_WORD) -> None:
        """Before an access. Raises Ended."""
        self.steps += 1
        if self.steps > STEPS_MAX:
            self.fail("nothing comes to an end")
        if count := self.interrupt(word):
            self.still[self.current] = self.steps + count
            self.pass_on()

    def pass_on(self) -> None:
        """To another thread, unless none can go on."""
        awake = [number for number in range(len(self.gates)) if number not in self.asleep]
        if not awake:
            self.fail("all sleep")
        able = [number for number in awake if self.still.get(number, 0) <= self.steps]
        following = self.choose(able or [number for number in awake if number != self.current] or awake)
        self.still.pop(following, None)
        mine, self.current = self.current, following
        if following != mine:
            self.gates[following].release()
            self.gates[mine].acquire()
        if self.failure:
            raise Ended

    def fail(self, why: str) -> None:
        self.failure = self.failure or why
        raise Ended

    def end(self, why: str) -> None:
        """Let all threads go on, and end."""
        self.failure = why
        for gate in self.gates:
            gate.release()


class Simulation:
    """`helpers` threads, and one that leads. Operation i of a program has `counts[i]` tasks."""

    def __init__(self, turns: Turns, helpers: int, monkeypatch: pytest.MonkeyPatch):
        self.turns, self.words = turns, [0] * (team.SHARE + (helpers + 2) * team.LINE)
        self.words[team.HELPERS] = helpers
        self.counts: list[int] = []
        self.done: list[list[bool]] = []
        names = ("get", "put", "post", "add", "exchange_if", "pause", "sleep_while", "wake", "task_count")
        for name in names:
            monkeypatch.setattr(team, name, getattr(self, name))
        monkeypatch.setattr(team, "_run", self.run_piece)
        for name in ("_begin", "_take", "_await"):
            monkeypatch.setattr(team, name, getattr(team, name).py_func)
        monkeypatch.setattr(team, "SPIN_WORK", 2)
        monkeypatch.setattr(team, "SPIN_END", 2)

    def get(self, number: int) -> int:
        self.turns.step(number)
        return self.words[number]

    def put(self, number: int, value: int) -> None:
        self.turns.step(number)
        self.words[number] = value

    post = put

    def add(self, number: int, value: int) -> int:
        self.turns.step()
        before = self.words[number]
        self.words[number] = before + value
        return before

    def exchange_if(self, number: int, expected: int, value: int) -> bool:
        self.turns.step()
        is_expected = self.words[number] == expected
        if is_expected:
            self.words[number] = value
        return is_expected

    def pause(self) -> None:
        self.turns.step()

    def sleep_while(self, number: int, value: int) -> None:
        self.turns.step()
        if self.words[number] == value:
            self.turns.asleep[self.turns.current] = number
            self.turns.pass_on()

    def wake(self, number: int) -> None:
        self.turns.step()
        for sleeper in [one for one, word in self.turns.asleep.items() if word == number]:
            del self.turns.asleep[sleeper]

    def task_count(self, operation: int) -> int:
        return self.counts[_number(operation)]

    def run_piece(self, operation, piece, pieces, arguments, sizes) -> None:
        """Tasks are done once, and behind all of the operations before."""
        number = _number(operation)
        count = self.counts[number]
        for task in range(piece * count // pieces, (piece + 1) * count // pieces):
            self.turns.step()
            if self.done[number][task]:
                self.turns.fail(f"task {task} of operation {number} is done twice")
            if not all(all(one) for one in self.done[:number]):
                self.turns.fail(f"operation {number} began before the ones before it had ended")
            self.done[number][task] = True

    def lead(self, programs: list[list[int]]) -> None:
        """Programs one after the other, each of which must be done when the call returns."""
        for self.counts in programs:
            self.done = [[False] * count for count in self.counts]
            team._lead.py_func(FIRST_ADDRESS, len(self.counts), self.words[team.HELPERS] + 1)
            if not all(all(one) for one in self.done):
                self.turns.fail("a program has ended before it was done")

    def run(self, programs: list[list[int]]) -> str:
        """-> what went wrong, or nothing"""
        helpers = self.words[team.HELPERS]
        self.turns.gates = [threading.Semaphore(0) for _ in range(helpers + 1)]

        def live(number: int) -> None:
            self.turns.gates[number].acquire()
            try:
                if number == 0:
                    self.lead(programs)
                else:
                    team._help.py_func(number - 1)
            except Ended:
                pass
            self.turns.end(self.turns.failure or "done")

        threads = [threading.Thread(target=live, args=(number,), daemon=True) for number in range(helpers + 1)]
        for thread in threads:
            thread.start()
        self.turns.gates[0].release()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        return "" if self.turns.failure == "done" else self.turns.failure


def _number(operation: int) -> int:
    """Of the operation at an address."""
    return (operation - FIRST_ADDRESS) // team.BYTES


@pytest.mark.parametrize("helpers", [1, 2, 3])
def test_programs_are_done_whoever_stands_still(helpers, monkeypatch):
    for seed in range(200):
        chance = random.Random(seed)

        def interrupt(word: int, chance=chance) -> int:
            return chance.choice((1, 10, 50, 200)) if chance.random() < 0.1 else 0

        programs = [[chance.choice((0, 1, 2, 3, 9)) for _ in range(chance.randrange(1, 5))] for _ in range(6)]
        with monkeypatch.context() as patched:
            failure = Simulation(Turns(interrupt, chance.choice), helpers, patched).run(programs)
        assert not failure, f"seed {seed}: {failure}"


def test_every_way_to_be_interrupted(monkeypatch):
    """Twice anywhere, or three times where jobs are named. Few errors of a protocol need more (Musuvathi and Qadeer
    2007, iterative context bounding)."""
    for places, times in ((None, 2), ((team.JOB, team.FIRST), 3)):
        counter = Interruptions(places, ())
        assert not _run(counter, monkeypatch)
        for numbers in itertools.combinations(range(counter.seen + 5), times):
            failure = _run(Interruptions(places, numbers), monkeypatch)
            assert not failure, f"interrupted before accesses {numbers}: {failure}"


class Interruptions:
    """A thread stands still until the other one does, or sleeps, before accesses with these numbers, of those to
    `places`."""

    def __init__(self, places: tuple[int, ...] | None, numbers: tuple[int, ...]):
        self.places, self.numbers, self.seen = places, numbers, 0

    def __call__(self, word: int) -> int:
        if self.places is not None and word not in self.places:
            return 0
        self.seen += 1
        return STEPS_MAX if self.seen - 1 in self.numbers else 0


def _run(interrupt: Interruptions, monkeypatch) -> str:
    with monkeypatch.context() as patched:
        return Simulation(Turns(interrupt, min), 1, patched).run([[1], [1]])
