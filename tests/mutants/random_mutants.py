"""Small mistakes that may be made anywhere: every way to make one in a file, for a sample of them.

What can't show is left out: messages, representations, annotations, what only a type checker reads, and assertions.
"""

from __future__ import annotations

import ast
import copy
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from edit import Edit, Source, files

SAMPLED = ("memory", "scheduler", "store", "server/access", "text")
COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.Div: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum", "maximum": "minimum"}
# Fields of a node that do not run, or say something to readers only.
SILENT = {"annotation", "returns", "decorator_list", "type_params", "exc", "cause", "msg"}
SILENT_FUNCTION = re.compile(r"__(repr|str)__|_?(message|describe)")
SILENT_CALL = re.compile(r"\b_?(log|logger|warnings)\.|^(TypeVar|NewType|cast|field|getLogger)\b")
SILENT_KEYWORD = {"strict", "slots", "frozen", "repr", "name", "help"}


@dataclass(frozen=True)
class RandomMutant:
    """`name` is unique, and the same as long as the file is."""

    name: str
    edit: Edit
    isa: str = "portable"


def sample(
    count: int, seed: int, folders: tuple[str, ...] = SAMPLED, changed: Mapping[str, set[int]] = MappingProxyType({})
) -> list[RandomMutant]:
    """In random order, so that a part of it is a sample too. Mutants of `changed` lines (by file) come first: at most
    half of all."""
    every = [mutant for folder in folders for file in files(folder) for mutant in mutants_of(file)]
    mixed = random.Random(seed).sample(every, len(every))
    first = [one for one in mixed if changed.get(one.edit.file, set()).intersection(one.edit.lines)][: count // 2]
    return [*first, *(one for one in mixed if one not in first)][:count]


def mutants_of(file: str) -> list[RandomMutant]:
    source = Source(file)
    found: dict[str, RandomMutant] = {}
    for node, what, new in _everywhere(source.tree):
        name = f"{file}:{node.lineno}:{node.col_offset}:{what}"
        found.setdefault(name, RandomMutant(name, source.replace(node, node, new)))
    return list(found.values())


Change = tuple[ast.expr | ast.stmt, str, ast.AST | list[ast.stmt]]


def _everywhere(node: ast.AST) -> Iterator[Change]:
    if _is_silent(node):
        return
    if isinstance(node, ast.expr | ast.stmt):
        yield from ((node, what, new) for what, new in _mistakes(node))
    if isinstance(node, ast.If | ast.IfExp | ast.While) and not _names_something(node.test):
        if not isinstance(node, ast.While):
            yield node.test, "always", ast.Constant(True)
        yield node.test, "never", ast.Constant(False)
    for name, value in ast.iter_fields(node):
        if name not in SILENT:
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _everywhere(child)


def _is_silent(node: ast.AST) -> bool:
    match node:
        case ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
            return True
        case ast.FunctionDef(name=name):
            return SILENT_FUNCTION.fullmatch(name) is not None
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.Call(func=function):
            return SILENT_CALL.search(ast.unparse(function)) is not None
        case ast.keyword(arg=name):
            return name in SILENT_KEYWORD
        case _:
            return False


def _mistakes(node: ast.expr | ast.stmt) -> Iterator[tuple[str, ast.AST | list[ast.stmt]]]:
    """The kind of the mistake, and what takes the place of the node."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            yield "comparison", _with(node, ops=[COMPARISONS[type(op)]()])
        case ast.BinOp(op=op) if type(op) in ARITHMETIC and not _is_text(node):
            yield "arithmetic", _with(node, op=ARITHMETIC[type(op)]())
        case ast.BoolOp(op=op):
            yield "and-or", _with(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield "sign", operand
        case ast.Constant(value=bool() as value):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int() as value):
            yield "plus-1", ast.Constant(value + 1)
            yield "minus-1", ast.Constant(value - 1)
        case ast.Constant(value=float() as value):
            yield "doubled", ast.Constant(2 * value or 1.0)
        case ast.Subscript(slice=ast.Slice(lower=lower, upper=upper, step=None) as part):
            if lower is not None:
                yield "slice-start", _with(node, slice=_with(part, lower=_one_more(lower)))
            if upper is not None:
                yield "slice-end", _with(node, slice=_with(part, upper=_one_more(upper)))
        case ast.Call(func=function, args=arguments):
            name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
            if name in CALLS:
                other = ast.Name(CALLS[name]) if isinstance(function, ast.Name) else _with(function, attr=CALLS[name])
                yield "min-max", _with(node, func=other)
            elif len(arguments) > 1 and not any(isinstance(one, ast.Starred) for one in arguments[:2]):
                yield "swapped", _with(node, args=[arguments[1], arguments[0], *arguments[2:]])
        case ast.Return(value=value) if value is not None and not _is_none(value):
            yield "none", [ast.Return(ast.Constant(None))]
        case ast.Break():
            yield "loop", [ast.Continue()]
        case ast.Continue():
            yield "loop", [ast.Break()]
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Delete():
            yield "deleted", [ast.Pass()]
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "deleted", [ast.Pass()]
        case _:
            pass


def _names_something(test: ast.expr) -> bool:
    return any(isinstance(part, ast.NamedExpr) for part in ast.walk(test))


def _with(node: ast.AST, **fields: object) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _one_more(bound: ast.expr) -> ast.expr:
    return ast.BinOp(bound, ast.Add(), ast.Constant(1))


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_text(node: ast.BinOp) -> bool:
    """Sums of texts, and unions of types, which fail wherever they run."""
    parts = (node.left, node.right)
    return any(isinstance(part, ast.JoinedStr) or _is_none(part) for part in parts) or any(
        isinstance(part, ast.Constant) and isinstance(part.value, str | bytes) for part in parts
    )
