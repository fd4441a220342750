"""Bugs to plant, as code in place of code: an expression or statements of a function, compared as syntax.

Neither line breaks nor comments, neither what stands around it nor the file that the function is in are part of a bug.
`_1` to `_9` stand for any expression, the same one wherever they occur. So a bug has the names that it is about, and
these are names of the code: what renames them there finds them here.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from edit import PACKAGE, Edit, Source, files

ANY = re.compile(r"_[1-9]")
Statements = list[ast.stmt]


@dataclass(frozen=True)
class PlantedBug:
    """`old` occurs exactly once in all functions of the qualified name `function`, such as `Lease.release`."""

    name: str
    function: str
    old: str
    new: str
    isa: str = "portable"  # the instruction set that shows it

    @cached_property
    def edit(self) -> Edit:
        """Raises LookupError if the source has moved on."""
        found = [edit for file in files("") for edit in self._edits(file)]
        if len(found) != 1:
            raise LookupError(f"'{self.name}': its code occurs {len(found)} times in functions named {self.function}")
        return found[0]

    def _edits(self, file: str) -> Iterator[Edit]:
        if self.function.rpartition(".")[2] not in text_of(file):
            return
        source = parsed(file)
        old, new = ast.parse(self.old).body, ast.parse(self.new).body
        for function in source.functions.get(self.function, []):
            if len(new) == 1 and isinstance(old[0], ast.Expr) and isinstance(new[0], ast.Expr):
                for node in ast.walk(function):
                    bound: dict[str, ast.expr] = {}
                    if isinstance(node, ast.expr) and fits(old[0].value, node, bound):
                        yield source.replace(node, node, filled(new[0].value, bound))
            else:
                for run in _runs(function, len(old)):
                    bound = {}
                    if fits(old, run, bound):
                        yield source.replace(run[0], run[-1], [filled(statement, bound) for statement in new])


text_of = cache(lambda file: (PACKAGE / file).read_text())
parsed = cache(Source)


def fits(pattern: object, node: object, bound: dict[str, ast.expr]) -> bool:
    """Leaves in `bound` what the names of `ANY` stand for."""
    if isinstance(pattern, ast.Name) and ANY.fullmatch(pattern.id) and isinstance(node, ast.expr):
        return ast.dump(bound.setdefault(pattern.id, node)) == ast.dump(node)
    if isinstance(pattern, list) and isinstance(node, list):
        return len(pattern) == len(node) and all(fits(a, b, bound) for a, b in zip(pattern, node, strict=True))
    if isinstance(pattern, ast.AST):
        return type(pattern) is type(node) and all(
            fits(getattr(pattern, name), getattr(node, name), bound)
            for name in pattern._fields
            if name not in ("ctx", "kind", "type_comment")
        )
    return pattern == node


def filled(new: Any, bound: dict[str, ast.expr]) -> Any:
    class Filler(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return bound.get(node.id, node)

    return Filler().visit(copy.deepcopy(new))


def _runs(function: ast.AST, length: int) -> Iterator[Statements]:
    """All runs of so many statements that follow each other."""
    for node in ast.walk(function):
        for block in ("body", "orelse", "finalbody"):
            statements = getattr(node, block, [])
            if isinstance(statements, list):
                yield from (statements[at : at + length] for at in range(len(statements) - length + 1))
