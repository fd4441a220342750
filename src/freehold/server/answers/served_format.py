"""The served model's answer format: from options, or detected from its chat template."""

from __future__ import annotations

from freehold.ipc.async_engine import AsyncEngine
from freehold.server.config import AUTO, NONE
from freehold.text.answers.parser import AnswerFormat
from freehold.text.answers.thinking import THINKING, thinking_of_template
from freehold.text.tools.formats import TOOL_FORMATS, format_of_template

AS_TEXT = "hermes"
GPT_OSS = "gpt_oss"  # calls and thoughts share one format


class ServedFormat:
    """The answer format, known once the model is loaded. `tool_call_parser` and `reasoning_parser` are names, `auto` or
    `none`."""

    def __init__(self, engine: AsyncEngine, tool_call_parser: str = AUTO, reasoning_parser: str = AUTO):
        self._engine = engine
        self._asked = tool_call_parser, reasoning_parser
        self._format: AnswerFormat | None = None

    @property
    def takes_tools(self) -> bool:
        return self._asked[0] != NONE

    @property
    def has_grammars(self) -> bool:
        """Whether answers can be constrained."""
        return self._engine.config.grammar_backend != NONE

    @property
    def format(self) -> AnswerFormat:
        """The format. Raises EngineUnavailable while the model is loading."""
        if self._format is None:
            tokenizer = self._engine.tokenizer
            template = "" if tokenizer.chat_template is None else tokenizer.chat_template.source
            calls, thoughts = self._asked
            shows_tools = tokenizer.chat_template is not None and tokenizer.chat_template.takes_tools
            if calls in (AUTO, NONE) and thoughts == GPT_OSS:
                calls = GPT_OSS
            elif calls in (AUTO, NONE):
                # If the template can't show tools, we describe them as text.
                calls = format_of_template(template, self._engine.info.model_path) if shows_tools else AS_TEXT
            if thoughts == AUTO:
                thoughts = thinking_of_template(template)
            self._format = AnswerFormat(TOOL_FORMATS[calls], THINKING.get(thoughts or NONE), tokenizer.markers)
        return self._format

    def describe(self) -> str:
        """Describe the format for the log."""
        thinking = self.format.thinking
        thoughts = self.format.tools.name if self.format.has_channels else NONE if thinking is None else thinking.name
        return f"tool calls: {self.format.tools.name if self.takes_tools else NONE}, reasoning: {thoughts}"
