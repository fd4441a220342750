"""Pieces of Lark, the language of grammars."""

from __future__ import annotations

import json
from collections.abc import Iterable

ANYTHING = r"/(.|\n)*/"


def literal(text: str) -> str:
    """That text and nothing else."""
    return json.dumps(text, ensure_ascii=False)


def any_of(expressions: Iterable[str]) -> str:
    """One of them."""
    return "(" + " | ".join(expressions) + ")"


def sequence(*expressions: str) -> str:
    """One behind the other."""
    return " ".join(one for one in expressions if one)
