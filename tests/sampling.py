"""The core suite: of each test with many cells, a few, others with each commit.

`@pytest.mark.sampled(n)` marks a parametrized test: the core runs n of its cells, spread evenly over all. The next
commit runs those behind them, so a few commits run every cell. `@pytest.mark.thorough` marks what the core leaves out.
`--thorough` runs everything, and so does naming a test with `::`. `--rest N` runs an N-th of what the core leaves out.
"""

from __future__ import annotations

import subprocess
from collections import defaultdict
from pathlib import Path

import pytest


def commit_number() -> int:
    """How many commits there are, 0 outside a repository."""
    command = ["git", "rev-list", "--count", "HEAD"]
    run = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return int(run.stdout) if run.returncode == 0 else 0


def chosen(cells: int, count: int, number: int) -> set[int]:
    """`count` of so many cells, evenly spread. `number` rotates them: -(-cells // count) numbers in a row reach all."""
    stretch = -(-cells // count)
    return set(range(number % stretch, cells, stretch))


def chosen_of(rest: list[pytest.Item], parts: int, number: int) -> set[pytest.Item]:
    """One of `parts` parts of what the core leaves out. `number` rotates them: `parts` numbers in a row reach all."""
    return set(rest[number % parts :: parts])


def left_out(items: list[pytest.Item], number: int) -> set[pytest.Item]:
    """What the core does not run."""
    out, cells = set(), defaultdict(list)
    for item in items:
        if item.get_closest_marker("thorough") is not None:
            out.add(item)
        elif sampled := item.get_closest_marker("sampled"):
            cells[getattr(item, "originalname", item.name), item.path, sampled.args[0]].append(item)
    for (_, _, count), of_test in cells.items():
        kept = chosen(len(of_test), count, number)
        out |= {item for cell, item in enumerate(of_test) if cell not in kept}
    return out


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="every cell of every test, and what takes long")
    parser.addoption("--rest", type=int, metavar="N", help="an N-th of what the core leaves out")
    parser.addoption("--core", action="store_true", help="what the core runs, of tests that are named, too")


@pytest.hookimpl(trylast=True)  # of the cells that `-m` leaves
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    is_named = any("::" in argument for argument in config.args)
    if config.option.thorough or (is_named and not config.option.core):
        return
    number = commit_number()
    out = left_out(items, number)
    if config.option.rest:
        rest = [item for item in items if item in out]
        out = set(items) - chosen_of(rest, config.option.rest, number)
    config.hook.pytest_deselected(items=[item for item in items if item in out])
    items[:] = [item for item in items if item not in out]
