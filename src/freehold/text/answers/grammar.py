"""The grammar of a whole answer: thoughts, then a form, calls, or text in which calls may begin."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from freehold.text.answers.parser import AnswerFormat
from freehold.text.lark import ANYTHING, any_of, sequence
from freehold.text.markers import Markers
from freehold.text.tools.tool import CallGrammar, OfSchema, Tool


@dataclass(frozen=True)
class ToolUse:
    """`tools` that may be called, in one call or `several`; whether a call is required."""

    tools: Sequence[Tool]
    several: bool = True
    is_required: bool = False


@dataclass(frozen=True)
class AnswerGrammar:
    """Constraints on an answer. `form`: a grammar for the answer unless it consists of calls. `thinking_budget`:
    maximum tokens of thoughts."""

    form: str | None = None
    use: ToolUse | None = None
    thinking_budget: int | None = None

    def lark(self, format: AnswerFormat, prompt: str, json: OfSchema) -> str | None:
        """Return Lark for an answer to `prompt`; None without constraints. Raises ValueError if thoughts can't be
        bounded."""
        if self.form is None and self.use is None and self.thinking_budget is None:
            return None
        before, lines = self._thoughts(format, prompt)
        ways: list[str] = []
        if self.use is not None:
            is_required = self.use.is_required or self.form is not None
            asked = CallGrammar(self.use.tools, self.use.several, is_required, json, format.markers)
            lines += format.tools.grammar(asked)
            ways.append("answer")
        if self.form is not None:
            begin = sequence(*map(format.markers.in_grammar, ("<|channel|>", "final", "<|message|>")))
            ways.append(f"{begin if format.has_channels else ''} %lark {{\n{self.form}\n}}")
        return "\n".join([f"start: {sequence(before, any_of(ways or [ANYTHING]))}", *lines])

    def _thoughts(self, format: AnswerFormat, prompt: str) -> tuple[str, list[str]]:
        """Return the part before the answer, and its rules."""
        markers, thinking = format.markers, format.thinking
        if format.has_channels:
            opens, closes = [("<|channel|>", "analysis", "<|message|>")], [("<|end|>", "<|start|>", "assistant")]
        elif thinking is None or thinking.is_over(prompt):
            return "", []
        else:
            opens, closes = [(one,) for one in thinking.opens], [(one,) for one in thinking.closes]
        opening, closing = (any_of(sequence(*map(markers.in_grammar, one)) for one in way) for way in (opens, closes))
        is_open = thinking is not None and thinking.is_open(prompt)
        return ("thoughts" if is_open else f"({opening} thoughts)?"), [
            *self._up_to(closing, closes, markers), r"NEWLINES: /\n{1,2}/",
        ]  # fmt: skip

    def _up_to(self, closing: str, closes: Sequence[tuple[str, ...]], markers: Markers) -> list[str]:
        """Return the rule `thoughts`, including their closing marker."""
        budget = self.thinking_budget
        if all(one[0] in markers.tokens for one in closes):
            limit = "" if budget is None else f"[max_tokens={budget}]"
            return [f"thoughts: thought {closing} NEWLINES?", f"thought{limit}: {ANYTHING}"]
        if budget is not None:
            raise ValueError("this model has no token that ends its thoughts")
        ends = "|".join(re.escape("".join(one)).replace("/", r"\/") for one in closes)
        return ["thoughts: thought NEWLINES?", f"thought[lazy]: /(.|\\n)*({ends})/"]
