"""The tests themselves: what the core leaves out is run by others, and a test that sleeps says why."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from sampling import chosen, chosen_of

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@pytest.mark.parametrize(("cells", "count"), [(1, 1), (5, 2), (6, 2), (7, 7), (3, 9), (180, 7)])
def test_a_few_commits_run_every_cell(cells, count):
    commits = -(-cells // count)
    for first in (0, 3):
        runs = [chosen(cells, count, first + number) for number in range(commits)]
        assert set().union(*runs) == set(range(cells))
        assert all(0 < len(run) <= count for run in runs)


def test_so_many_parts_are_the_rest():
    rest = list("abcdefghij")
    assert sorted(one for number in range(7, 10) for one in chosen_of(rest, 3, number)) == rest


def sleeps_of(tree: ast.AST, is_polling: bool = False) -> Iterator[ast.Call]:
    """Calls of `sleep` with some seconds, outside of loops."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("sleep") and not is_polling:
            if ast.unparse(node.args[0]) != "0":
                yield node
        is_loop = isinstance(node, ast.While | ast.For | ast.AsyncFor)
        yield from sleeps_of(node, is_loop or (is_polling and not isinstance(node, FUNCTIONS)))


def test_a_test_that_sleeps_says_why():
    """Tests wait in a loop, or for an event. Where nothing may happen for a while, a comment says so."""
    for path in Path(__file__).parent.rglob("*.py"):
        text = path.read_text()
        for call in sleeps_of(ast.parse(text)):
            line = text.splitlines()[call.lineno - 1]
            assert "#" in line or "lambda" in line, f"{path}:{call.lineno} sleeps, and does not say why"
