"""Structural tags, as in SGLang: free text in which a trigger starts constrained text."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from freehold.server.constraints.schemas import SchemaOptions, json_grammar, parsed
from freehold.text.lark import ANYTHING, literal, sequence


class Structure(BaseModel):
    """`begin`, a document of `schema`, then `end`."""

    model_config = ConfigDict(populate_by_name=True)

    begin: str = Field(min_length=1)
    of: dict[str, Any] | bool = Field(default_factory=dict[str, Any], alias="schema")
    end: str = ""


class StructuralTag(BaseModel):
    type: str = "structural_tag"
    structures: list[Structure] = Field(min_length=1, max_length=128)
    triggers: list[str] = Field(min_length=1, max_length=128)


def tag_grammar(given: str | dict[str, Any], options: SchemaOptions) -> str:
    """Return a whole grammar in Lark. Raises ValueError."""
    tag = _read(given)
    lines = [
        "start: (" + " | ".join(f"tag_{i}" for i in range(len(tag.triggers))) + ")* rest",
        "rest: TEXT",
        f"TEXT: {ANYTHING}",
    ]
    left = list(tag.structures)
    for i, trigger in enumerate(tag.triggers):
        mine = [one for one in left if trigger and one.begin.startswith(trigger)]
        if not mine:
            raise ValueError(f"triggers: no structure begins with '{trigger}'")
        left = [one for one in left if one not in mine]
        forms = [
            sequence(literal(one.begin[len(trigger) :]), json_grammar(parsed(one.of), options), literal(one.end))
            for one in mine
        ]
        lines.append(f"trigger_{i}[lazy]: TEXT {literal(trigger)}")
        lines.append(f"tag_{i}: trigger_{i} ({' | '.join(forms)})")
    if left:
        raise ValueError(f"structures: no trigger begins '{left[0].begin}'")
    return "\n".join(lines)


def _read(given: str | dict[str, Any]) -> StructuralTag:
    try:
        fields = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from None
    if isinstance(fields, dict) and "format" in fields:
        raise ValueError("format: is not supported, use structures and triggers")
    try:
        return StructuralTag.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc'])) or 'structural_tag'}: {first['msg']}") from None
