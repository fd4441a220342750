"""JSON schemas as parts of a grammar."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

WHITESPACE = r"[ \n\t]{1,8}"  # between tokens, bounded: a small model could fill its whole output with whitespace
GUIDANCE = "x-guidance"  # llguidance's own keyword; only we may set it


@dataclass(frozen=True)
class SchemaOptions:
    """`is_lenient`: unsupported keywords are ignored, not refused. `whitespace`: a regular expression for text between
    tokens, None for no text. `is_closed`: objects have only the schema's properties."""

    is_lenient: bool = False
    whitespace: str | None = WHITESPACE
    is_closed: bool = False


ANY_OBJECT: dict[str, Any] = {"type": "object"}


def parsed(given: str | dict[str, Any] | bool) -> dict[str, Any] | bool:
    """Return a schema, parsed if it is text. Raises ValueError with the problem."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ValueError(f"is not JSON: {error}") from None
        except RecursionError:
            raise ValueError("is nested too deep") from None
    if not isinstance(given, (dict, bool)):
        raise ValueError("must be a JSON schema: an object")
    return given


def json_grammar(schema: dict[str, Any] | bool, options: SchemaOptions = SchemaOptions()) -> str:
    """Return Lark for a document of this schema. Raises ValueError."""
    if schema is False:
        raise ValueError("allows nothing")
    whole: dict[str, Any] = {} if schema is True else dict(schema)
    try:
        whole = _closed(whole) if options.is_closed else whole
        whole[GUIDANCE] = {
            "whitespace_flexible": options.whitespace is not None,
            **({} if options.whitespace is None else {"whitespace_pattern": options.whitespace}),
            "lenient": options.is_lenient,
            "coerce_one_of": True,
        }
        return f"%json {json.dumps(whole)}"
    except RecursionError:
        raise ValueError("is nested too deep") from None


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(one) for one in schema]  # pyright: ignore[reportUnknownVariableType]
    if not isinstance(schema, dict):
        return schema
    found = {name: _closed(value) for name, value in schema.items()}  # pyright: ignore[reportUnknownVariableType]
    if "properties" in found:
        found.setdefault("additionalProperties", False)
    return found  # pyright: ignore[reportUnknownVariableType]
