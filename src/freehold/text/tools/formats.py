"""Tool call formats by name, and their detection from chat templates."""

from __future__ import annotations

from freehold.text.tools.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from freehold.text.tools.gpt_oss import GptOss
from freehold.text.tools.hermes import Hermes
from freehold.text.tools.llama3_json import Llama3Json
from freehold.text.tools.mistral import Mistral
from freehold.text.tools.pythonic import Pythonic
from freehold.text.tools.qwen3_coder import Qwen3Coder
from freehold.text.tools.qwen25_coder import Qwen25Coder
from freehold.text.tools.tool import ToolFormat

TOOL_FORMATS: dict[str, ToolFormat] = {
    one.name: one
    for one in (
        Hermes(), Qwen25Coder(), Qwen3Coder(), Llama3Json(), Pythonic(), Mistral(), DEEPSEEK_V3, DEEPSEEK_V31, GptOss(),
    )
}  # fmt: skip


def format_of_template(source: str, model: str) -> str:
    """Return the format's name; `model` is the model's name."""
    if "<|channel|>" in source:
        return "gpt_oss"
    if "<｜tool▁calls▁begin｜>" in source:
        return "deepseek_v3" if "```json" in source else "deepseek_v31"
    if "<function=" in source:
        return "qwen3_coder"
    if "[TOOL_CALLS]" in source:
        return "mistral"
    if "<tool_call>" in source:
        return "qwen25_coder" if "qwen2.5-coder" in model.lower() else "hermes"
    if "<|python_start|>" in source or "[func_name1(" in source:
        return "pythonic"
    if "<|python_tag|>" in source or '"parameters": ' in source:
        return "llama3_json"
    return "hermes"
