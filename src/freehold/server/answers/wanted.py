"""The answer that a client wants: form, tools and thoughts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from freehold.contract.constraint import Constraint
from freehold.contract.errors import InvalidParameter
from freehold.server.answers.served_format import ServedFormat
from freehold.server.answers.tools import Offer
from freehold.server.constraints.schemas import SchemaOptions, json_grammar
from freehold.text.answers.grammar import AnswerGrammar
from freehold.text.answers.parser import ExpectedAnswer


@dataclass(frozen=True)
class WantedAnswer:
    """`form`: the constraint besides tools. `thinking_budget`: tokens, given in the field `budget_field`. Raises
    InvalidParameter for options that conflict or that this server lacks."""

    served: ServedFormat
    offer: Offer = Offer()
    form: Constraint | None = None
    thinking_budget: int | None = None
    budget_field: str = "thinking_budget"
    separates_thoughts: bool = True

    def __post_init__(self) -> None:
        use = self.offer.use
        if use is not None and not self.served.takes_tools:
            raise InvalidParameter("tools", "tool calls are switched off (--tool-call-parser none)")
        if use is not None and use.is_required and self.form is not None:
            raise InvalidParameter(self.form.field, "can't be given where tool_choice requires a call")
        if use is not None and use.is_required and not self.served.has_grammars:
            raise InvalidParameter("tool_choice", "can't require a call: grammars are off (--grammar-backend none)")
        if self.thinking_budget is not None and self.thinking_budget < 1:
            raise InvalidParameter(self.budget_field, "must be at least 1")

    def expected(self, prompt: str) -> ExpectedAnswer | None:
        """Return how to read the answer to this prompt; None if all of it is content."""
        tools = {} if self.offer.use is None else {tool.name: tool for tool in self.offer.use.tools}
        return self.served.format.expecting(tools, prompt, self.separates_thoughts)

    def constraint(self, prompt: str) -> Constraint | None:
        """Return the constraint on the answer to this prompt. Raises InvalidParameter."""
        format = self.served.format
        if self.thinking_budget is not None and format.thinking is None and not format.has_channels:
            raise InvalidParameter(self.budget_field, "needs a reasoning model, and this one has no reasoning parser")
        has_grammars = self.served.has_grammars
        form, use = None if self.form is None else self.form.grammar, self.offer.use if has_grammars else None
        try:
            grammar = AnswerGrammar(form, use, self.thinking_budget).lark(format, prompt, _json)
        except ValueError as error:
            raise InvalidParameter(self.budget_field, str(error)) from None
        if grammar is None:
            return None
        field = self.form.field if self.form is not None else "tools" if use is not None else self.budget_field
        return Constraint(grammar, field)


def _json(schema: dict[str, Any], is_lenient: bool) -> str:
    """Return the grammar of a tool's arguments. Unnamed ones are rejected unless the schema allows them."""
    try:
        return json_grammar(schema, SchemaOptions(is_lenient, is_closed=True))
    except ValueError as error:
        raise InvalidParameter("tools", str(error)) from None
