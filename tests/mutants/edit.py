"""A place in the source and what to write there. All mutants are edits: the planted ones and the random ones."""

from __future__ import annotations

import ast
import difflib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "src" / "freehold"

CLOSED = ast.stmt | ast.Slice | ast.Call | ast.Name | ast.Constant | ast.Attribute | ast.Subscript  # needs no brackets


@dataclass(frozen=True)
class Edit:
    """`first` and `end` count bytes, as the positions of `ast` do. What is not replaced stays as it is written."""

    file: str  # below src/freehold
    first: int
    end: int
    text: str

    @property
    def changed(self) -> bytes:
        source = (PACKAGE / self.file).read_bytes()
        return source[: self.first] + self.text.encode() + source[self.end :]

    @property
    def lines(self) -> range:
        source = (PACKAGE / self.file).read_bytes()
        return range(source[: self.first].count(b"\n") + 1, source[: self.end].count(b"\n") + 2)

    @property
    def diff(self) -> str:
        old, new = (PACKAGE / self.file).read_text().splitlines(), self.changed.decode().splitlines()
        return "\n".join(list(difflib.unified_diff(old, new, self.file, self.file, lineterm="", n=2))[2:])


class Source:
    """A file of the package, read and parsed once."""

    def __init__(self, file: str) -> None:
        text = (PACKAGE / file).read_bytes()
        self.file = file
        self.tree = ast.parse(text)
        self.functions: dict[
            str, list[ast.AST]
        ] = {}  # and classes, by qualified name; methods of a name may be several
        self._name(self.tree, "")
        self._line_starts = [0]
        for line in text.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))

    def _name(self, parent: ast.AST, prefix: str) -> None:
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                self.functions.setdefault(prefix + node.name, []).append(node)
                self._name(node, f"{prefix}{node.name}.")
            else:
                self._name(node, prefix)

    def replace(self, first: ast.expr | ast.stmt, last: ast.expr | ast.stmt, new: ast.AST | list[ast.stmt]) -> Edit:
        """From the first node to the last, which may be the same. Expressions get the brackets that they need."""
        assert last.end_lineno is not None
        assert last.end_col_offset is not None
        start = self._line_starts[first.lineno - 1] + first.col_offset
        end = self._line_starts[last.end_lineno - 1] + last.end_col_offset
        if isinstance(new, list):
            lines = [line for statement in new for line in ast.unparse(statement).splitlines()]
            return Edit(self.file, start, end, ("\n" + " " * first.col_offset).join(lines))
        text = ast.unparse(new)
        return Edit(self.file, start, end, text if isinstance(new, CLOSED) else f"({text})")


def files(folder: str) -> list[str]:
    """All files of a folder of the package, or the one file of that name."""
    path = PACKAGE / folder
    found = [path] if path.is_file() else sorted(path.rglob("*.py"))
    return [str(one.relative_to(PACKAGE)) for one in found]
