"""Converts constraint fields of a body to one constraint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from freehold.contract.constraint import GRAMMAR_BYTES_MAX, Constraint
from freehold.contract.errors import InvalidParameter
from freehold.server.constraints.expressions import choice_grammar, regex_grammar
from freehold.server.constraints.gbnf import lark_of
from freehold.server.constraints.schemas import ANY_OBJECT, SchemaOptions, json_grammar, parsed
from freehold.server.constraints.tags import tag_grammar

ANY_JSON = "$$ANY$$"  # SGLang's marker
WHITESPACE_LENGTH_MAX = 200

_Maker = Callable[[Any, SchemaOptions], str]  # from a field's value to a whole grammar; raises ValueError
_Asked = dict[str, tuple[_Maker, Any]]  # by field


class StructuredOutputs(BaseModel):
    """vLLM's `structured_outputs`: exactly one of the first six."""

    model_config = ConfigDict(extra="forbid")

    schema_of_json: str | dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    disable_fallback: bool | None = None


class ConstraintFields(BaseModel):
    """The constraint fields of OpenAI, vLLM, SGLang and llama.cpp. An empty value means not given."""

    response_format: dict[str, Any] | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None

    def constraint(self) -> Constraint | None:
        """Return the constraint, None if none is given. Raises InvalidParameter."""
        whitespace = self.guided_whitespace_pattern
        options = SchemaOptions() if not whitespace else _with_whitespace("guided_whitespace_pattern", whitespace)
        asked: _Asked = {
            name: (_MAKERS[kind], value) for name, kind in _FIELDS.items() if (value := getattr(self, name))
        }
        if self.structured_outputs is not None:
            more, options = _of_vllm(self.structured_outputs, options)
            asked |= more
        if self.response_format and (form := _of_response_format(self.response_format)) is not None:
            name, maker, value, options = form
            asked = {name: (maker, value), **asked}
        return one_of(asked, options)


def one_of(
    asked: _Asked,
    options: SchemaOptions = SchemaOptions(),  # noqa: B008
) -> Constraint | None:
    """Return the only constraint given. Raises InvalidParameter if it is invalid or there are two."""
    if not asked:
        return None
    (field, (maker, value)), *others = asked.items()
    if others:
        raise InvalidParameter(others[0][0], f"an output has one form, and {field} gives one already")
    if isinstance(value, str) and len(value) > GRAMMAR_BYTES_MAX:
        raise InvalidParameter(field, f"must have at most {GRAMMAR_BYTES_MAX} characters")
    try:
        return Constraint(maker(value, options), field)
    except ValueError as error:
        raise InvalidParameter(field, str(error)) from None


def native_constraint(given: dict[str, str | None]) -> Constraint | None:
    """Return the constraint of the native API's `sampling_params`, by field. Raises InvalidParameter."""
    return one_of({name: (_MAKERS[_FIELDS[name]], value) for name, value in given.items() if value})


def _schema(given: Any, options: SchemaOptions) -> str:
    return "start: " + json_grammar(True if given == ANY_JSON else parsed(given), options)


_MAKERS: dict[str, _Maker] = {
    "schema": _schema,
    "object": lambda _, options: "start: " + json_grammar(ANY_OBJECT, options),
    "regex": lambda pattern, _: "start: " + regex_grammar(pattern),
    "choice": lambda choices, _: "start: " + choice_grammar(choices),
    "grammar": lambda source, _: lark_of(source),
    "tag": tag_grammar,
}
_FIELDS = {
    "json_schema": "schema", "regex": "regex", "ebnf": "grammar", "grammar": "grammar", "structural_tag": "tag",
    "guided_json": "schema", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar",
}  # fmt: skip
_VLLM = {
    "json": "schema", "regex": "regex", "choice": "choice", "grammar": "grammar", "json_object": "object",
    "structural_tag": "tag",
}  # fmt: skip


def _of_vllm(given: StructuredOutputs, options: SchemaOptions) -> tuple[_Asked, SchemaOptions]:
    found = {
        f"structured_outputs.{name}": (_MAKERS[kind], value)
        for name, kind in _VLLM.items()
        if (value := getattr(given, "schema_of_json" if name == "json" else name)) or value == {}
    }
    if not found and given.model_fields_set - {"disable_fallback"}:
        raise InvalidParameter("structured_outputs", f"needs one of {', '.join(_VLLM)}")
    if given.whitespace_pattern:
        options = _with_whitespace("structured_outputs.whitespace_pattern", given.whitespace_pattern)
    whitespace = None if given.disable_any_whitespace else options.whitespace
    return found, SchemaOptions(options.is_lenient, whitespace, bool(given.disable_additional_properties))


def _of_response_format(
    given: dict[str, Any],
) -> tuple[str, _Maker, Any, SchemaOptions] | None:
    """Return the field, its grammar maker, its value and the schema options."""
    kind, options = given.get("type"), SchemaOptions()
    if kind == "text":
        return None
    if kind == "json_object":
        return "response_format", _MAKERS["object"], True, options
    if kind == "structural_tag":
        return "response_format", tag_grammar, given, options
    if kind != "json_schema":
        raise InvalidParameter("response_format.type", "must be text, json_object, json_schema or structural_tag")
    named = given.get("json_schema")
    schema: Any = named.get("schema") if isinstance(named, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if not isinstance(schema, dict):
        raise InvalidParameter("response_format.json_schema.schema", "must be a JSON schema: an object")
    is_lenient = named.get("strict") is False  # pyright: ignore
    return "response_format.json_schema.schema", _schema, schema, SchemaOptions(is_lenient)


def _with_whitespace(field: str, pattern: str) -> SchemaOptions:
    if len(pattern) > WHITESPACE_LENGTH_MAX:
        raise InvalidParameter(field, f"must have at most {WHITESPACE_LENGTH_MAX} characters")
    return SchemaOptions(whitespace=pattern)
