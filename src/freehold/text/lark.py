"""Parts of Lark, the grammar language."""

from __future__ import annotations

import json
from collections.abc import Iterable

ANYTHING = r"/(.|\n)*/"


def literal(text: str) -> str:
    """Return an expression for exactly this text."""
    return json.dumps(text, ensure_ascii=False)


def any_of(expressions: Iterable[str]) -> str:
    """Return an expression for one of these."""
    return "(" + " | ".join(expressions) + ")"


def sequence(*expressions: str) -> str:
    """Return an expression for these in sequence."""
    return " ".join(one for one in expressions if one)
