"""gpt-oss: Harmony, where thoughts, calls and the answer are messages in channels."""

from __future__ import annotations

import re

from freehold.text.answers.source import Reading, Source
from freehold.text.lark import ANYTHING, any_of, literal
from freehold.text.markers import Markers
from freehold.text.tools.json_call import read_arguments
from freehold.text.tools.tool import CallGrammar, Tools, plain_call_id

CHANNEL, MESSAGE, CONSTRAIN = "<|channel|>", "<|message|>", "<|constrain|>"
START, END, CALL, RETURN = "<|start|>", "<|end|>", "<|call|>", "<|return|>"
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")


class GptOss:
    """`<|channel|>analysis<|message|>...<|end|>` is a thought, `<|channel|>final<|message|>...<|return|>` the answer,
    and `<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>` a call."""

    name = "gpt_oss"
    markers = (CHANNEL, MESSAGE, CONSTRAIN, START, END, CALL, RETURN)
    call_id = staticmethod(plain_call_id)

    def read(self, source: Source, tools: Tools, markers: Markers) -> Reading[None]:
        ends = tuple(markers.seen(marker) for marker in (END, CALL, RETURN, START))
        while True:
            header: list[str] = []
            if not (yield from source.until((markers.seen(MESSAGE),), header.append)):
                return source.content("" if _is_header(header, markers) else "".join(header))
            yield from source.expect(markers.seen(MESSAGE))
            text = markers.shown("".join(header))
            called = _RECIPIENT.search(text)
            if called is not None and called[1] in tools:
                yield from source.attempt(_call(source, called[1]), 0)
            is_thought = CHANNEL + "analysis" in text
            yield from source.until(ends, source.reasoning if is_thought else source.content)
            if is_thought:
                source.end_thoughts()
            yield from source.accept(*ends)

    def grammar(self, asked: CallGrammar) -> list[str]:
        """Return the grammar after the thoughts."""
        channel, message = asked.marker(CHANNEL), asked.marker(MESSAGE)
        forms = (
            f"{literal(f'commentary to=functions.{tool.name} ')} {asked.marker(CONSTRAIN)} {literal('json')} {message} "
            f"{asked.arguments(tool)}"
            for tool in asked.tools
        )
        final = f'| {channel} "final" {message} TEXT'
        return [f"answer: {channel} call {'' if asked.is_required else final}", f"call: {any_of(forms)}",
                f"TEXT: {ANYTHING}"]  # fmt: skip


def _is_header(parts: list[str], markers: Markers) -> bool:
    return "".join(parts).lstrip().startswith((markers.seen(CHANNEL), markers.seen(START), "assistant"))


def _call(source: Source, name: str) -> Reading[None]:
    yield from source.skip_space()
    yield from read_arguments(source, name)
    yield from source.skip_space()
