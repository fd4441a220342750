"""Chat templates of models that people use, as llama.cpp collects them: calls that a template writes are read back."""

import itertools
import json
import os
import tarfile
from pathlib import Path

import pytest

from freehold.contract.errors import ChatTemplateError
from freehold.text.answers.answer import Answer
from freehold.text.answers.parser import AnswerFormat
from freehold.text.chat_template import ChatTemplate
from freehold.text.markers import Markers
from freehold.text.tools.formats import TOOL_FORMATS, format_of_template
from freehold.text.tools.tool import Tool

WHEELS = Path(os.environ.get("CONFORMANCE_WHEELS", ".venv-conformance/wheels"))
ARGUMENTS = {"a": 2.5, "exact": True, "unit": "km"}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "exact": {"type": "boolean"}, "unit": {"type": "string"}},
        },
    },
}
KNOWN = {"add": Tool("add", parameters=TOOL["function"]["parameters"])}
ENDS = ("<EOS>", "<|im_end|>", "<|eot_id|>", "</s>", "<|end_of_text|>", "<|call|>", "<|end|>", "\n\n<sep>", "\n\nUser:")
# Those of formats that we have, and what else they are. The others have formats of their own: their calls are text.
READ = {
    "Bielik-11B-v3.0-Instruct", "HuggingFaceTB-SmolLM3-3B", "MiMo-VL", "Mistral-Small-3.2-24B-Instruct-2506",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "Qwen-QwQ-32B", "Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B",
    "Qwen3-Coder", "Qwen3.5-4B", "Reka-Edge", "StepFun3.5-Flash", "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "deepseek-ai-DeepSeek-V3.1", "ibm-granite-granite-4.0",
    "ibm-granite-granite-4.1", "llama-cpp-rwkv-world", "meta-llama-Llama-3.1-8B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct", "meta-llama-Llama-3.3-70B-Instruct", "microsoft-Phi-3.5-mini-instruct",
    "mistralai-Ministral-3-14B-Reasoning-2512", "mistralai-Mistral-Nemo-Instruct-2407",
    "unsloth-mistral-Devstral-Small-2507", "google-gemma-2-2b-it",
}  # fmt: skip
# What a template itself refuses, in its own words.
REFUSES = {
    "CohereForAI-c4ai-command-r-plus-tool_use": "description", "Kimi-K2-Instruct": "append",
    "Kimi-K2-Thinking": "append", "fireworks-ai-llama-3-firefunction-v2": "functions",
    "llama-cpp-deepseek-r1": "generator", "muse-glimmer": "Muse Glimmer",
}  # fmt: skip


def templates() -> dict[str, str]:
    sources = {}
    for archive in WHEELS.glob("llama_cpp_python-*.tar.gz"):
        with tarfile.open(archive) as files:
            for member in files:
                if "/models/templates/" in member.name and member.name.endswith(".jinja"):
                    source = files.extractfile(member)
                    assert source is not None
                    sources[Path(member.name).stem] = source.read().decode()
    return sources


SOURCES = templates()


def conversation(template: ChatTemplate) -> str:
    """What follows the prompt for an answer that calls a tool."""
    user = {"role": "user", "content": "Add."}
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": json.dumps(ARGUMENTS)}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "content": "RESULT", "tool_call_id": "abcdefghi", "name": "add"}
    prompt = template.render([user], True, tools=[TOOL])
    whole = template.render([user, answer, result], False, tools=[TOOL])
    pairs = zip(prompt, whole, strict=False)
    common = "".join(one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    # The prompt may begin a thought, which the history leaves out: calls begin with the same letter as it does.
    begin = max(common.rfind("<") if prompt[len(common) :] else len(common), common.rfind("\n") + 1)
    text = whole[min(begin, len(common)) :].split("RESULT")[0]
    for end in ENDS:
        text = text.split(end)[0]
    return text


@pytest.mark.skipif(not SOURCES, reason="llama-cpp-python's sources were not fetched: make conformance")
@pytest.mark.parametrize("name", sorted(SOURCES))
def test_calls_that_a_template_writes_are_read_back(name):
    template = ChatTemplate(SOURCES[name], {"bos_token": "", "eos_token": "<EOS>"})
    if name in REFUSES:
        with pytest.raises(ChatTemplateError, match=REFUSES[name]):
            conversation(template)
        return
    text = conversation(template)
    if name not in READ:
        return
    form = format_of_template(SOURCES[name], name) if template.takes_tools else "hermes"
    expected = AnswerFormat(TOOL_FORMATS[form], None, Markers([])).expecting(KNOWN, "")
    answer, parser = Answer(), expected.parser("x")
    answer.add([*parser.add(text), *parser.finish()])
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == [("add", ARGUMENTS)], text


@pytest.mark.skipif(not SOURCES, reason="likewise")
def test_all_templates_were_found():
    assert len(SOURCES) >= 70
    assert SOURCES.keys() >= READ | REFUSES.keys()
