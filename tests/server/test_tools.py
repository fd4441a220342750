"""Tool calls over HTTP, with the real clients. The model is small: what it has to say is bound, not trusted."""

import json
from typing import Literal

import anthropic
import httpx
import pytest
from jsonschema import validate

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TIME = {
    "type": "object",
    "properties": {"zone": {"enum": ["CET", "UTC"]}},
    "required": ["zone"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": WEATHER, "get_time": TIME}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"Call {name}.", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
ASKED = [{"role": "user", "content": "What is the weather in Paris for the next three days?"}]
MODEL = "SmolLM2-135M-Instruct"
OPTIONS = {"model": MODEL, "messages": ASKED, "temperature": 0, "max_tokens": 120}
NAMED = {"type": "function", "function": {"name": "get_time"}}


def from_stream(chunks):
    """-> content, calls and the reason, as a client collects them."""
    content, calls, reason = "", {}, None
    for chunk in chunks:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for part in choice.delta.tool_calls or ():
                if part.index not in calls:
                    assert part.id, "the first part has the id"
                    calls[part.index] = [part.id, part.function.name, ""]
                else:
                    assert part.id is None, "and no other"
                    assert part.function.name is None
                calls[part.index][2] += part.function.arguments or ""
            reason = choice.finish_reason or reason
    return content, [calls[i] for i in sorted(calls)], reason


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("parallel", [True, False])
def test_a_call_that_is_required_is_made_and_follows_its_schema(client, choice, parallel):
    options = {**OPTIONS, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": parallel}
    answer = client.chat.completions.create(**options).choices[0]
    calls = answer.message.tool_calls
    assert answer.finish_reason in ("tool_calls", "length")
    assert answer.message.content is None
    for call in calls if answer.finish_reason == "tool_calls" else calls[:-1]:
        validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    if choice is NAMED:
        assert [call.function.name for call in calls] == ["get_time"]
    assert parallel or len(calls) == 1
    content, streamed, reason = from_stream(client.chat.completions.create(**options, stream=True))
    assert (content, reason) == ("", answer.finish_reason)
    assert [call[1:] for call in streamed] == [[call.function.name, call.function.arguments] for call in calls]


def test_tools_that_may_be_called_are_shown_to_the_model(client):
    plain, shown, hidden = (
        client.chat.completions.create(**OPTIONS, **more)
        for more in ({}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"})
    )
    assert shown.usage.prompt_tokens > plain.usage.prompt_tokens + 50
    assert hidden.usage.prompt_tokens == plain.usage.prompt_tokens
    for call in shown.choices[0].message.tool_calls or ():
        json.loads(call.function.arguments)
    assert hidden.choices[0].message.tool_calls is None
    assert hidden.choices[0].message.content == plain.choices[0].message.content


def test_several_outputs_have_calls_of_their_own(client):
    answer = client.chat.completions.create(
        **{**OPTIONS, "temperature": 1.0}, seed=1, n=3, tools=TOOLS, tool_choice="required", parallel_tool_calls=False
    )
    ids = [choice.message.tool_calls[0].id for choice in answer.choices]
    assert len(set(ids)) == 3


def test_results_go_back_to_the_model(client):
    call = client.chat.completions.create(**OPTIONS, tools=TOOLS, tool_choice=NAMED).choices[0].message
    result = {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "12:30"}
    messages = [*ASKED, call.model_dump(exclude_none=True), result]
    answer = client.chat.completions.create(**{**OPTIONS, "messages": messages, "max_tokens": 20}, tools=TOOLS)
    assert answer.choices[0].message.content or answer.choices[0].message.tool_calls


def test_a_session_keeps_calls_and_goes_on(server, client):
    session = httpx.post(f"{server}/v1/sessions", json={}).json()["id"]
    more = {"session_id": session}
    first = client.chat.completions.create(**OPTIONS, tools=TOOLS, tool_choice=NAMED, extra_body=more)
    (call,) = first.choices[0].message.tool_calls
    result = [{"role": "tool", "tool_call_id": call.id, "content": "12:30"}]
    turn = {**OPTIONS, "messages": result, "max_tokens": 8}
    second = client.chat.completions.create(**turn, tools=TOOLS, extra_body=more)
    kept = first.usage.prompt_tokens + first.usage.completion_tokens
    assert second.usage.prompt_tokens > kept
    assert second.usage.prompt_tokens_details.cached_tokens >= kept - 16, "the call is as it was sampled"
    whole = client.chat.completions.create(
        **{**OPTIONS, "messages": [*ASKED, first.choices[0].message.model_dump(exclude_none=True), *result]},
        tools=TOOLS,
        extra_body={"max_tokens": 8},
    )
    assert whole.choices[0].message.content == second.choices[0].message.content
    lost = httpx.post(
        f"{server}/v1/chat/completions",
        json={**turn, **more, "messages": [{"role": "tool", "tool_call_id": "nobody", "content": "1"}]},
    )
    assert (lost.status_code, lost.json()["error"]["param"]) == (400, "messages[0].tool_call_id")
    third = client.chat.completions.create(**{**turn, "messages": ASKED}, extra_body=more)
    assert third.usage.prompt_tokens > second.usage.prompt_tokens, "what was refused has left no trace"
    httpx.delete(f"{server}/v1/sessions/{session}")


FUNCTION = TOOLS[0]["function"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]},
         "tools[0].function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tools": TOOLS[:1], "tool_choice": NAMED}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": 3}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [{"type": "function", "function": {**FUNCTION, "strict": True, "parameters": {"type": "array",
          "uniqueItems": True}}}], "tool_choice": "required"}, "tools"),
        ({"messages": [*ASKED, {"role": "tool", "tool_call_id": "x", "content": "1"}]}, "messages[1].tool_call_id"),
        ({"messages": [*ASKED, {"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "f",
          "arguments": "[1]"}}]}]}, "messages[1].tool_calls[0].function.arguments"),
        ({"messages": [*ASKED, {"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "f",
          "arguments": "{"}}]}]}, "messages[1].tool_calls[0].function.arguments"),
        ({"messages": [*ASKED, {"role": "assistant", "tool_calls": [{"id": {}, "function": {"name": "f"}}]}]},
         "messages[1].tool_calls[0].id"),
        ({"messages": [*ASKED, {"role": "assistant", "tool_calls": [{"id": "x"}]}]},
         "messages[1].tool_calls[0].function"),
        ({"thinking_budget": 0}, "thinking_budget"),
        ({"thinking_budget": 10}, "thinking_budget"),
    ],
)  # fmt: skip
def test_what_can_not_be_done_is_said_by_its_field(server, change, param):
    answer = httpx.post(f"{server}/v1/chat/completions", json={**OPTIONS, **change}, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_keywords_that_can_not_be_followed_are_ignored_unless_the_tool_is_strict(client):
    odd = {**WEATHER, "not": {"type": "string"}}
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": odd}}]
    answer = client.chat.completions.create(**OPTIONS, tools=tools, tool_choice="required", parallel_tool_calls=False)
    (call,) = answer.choices[0].message.tool_calls
    validate(json.loads(call.function.arguments), WEATHER)


def test_langchain_binds_tools_and_asks_for_structures(server):
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel

    class Zone(BaseModel):
        """A zone of time."""

        name: Literal["CET", "UTC"]

    chat = ChatOpenAI(model=MODEL, base_url=f"{server}/v1", api_key="none", temperature=0, max_completion_tokens=60)
    answer = chat.bind_tools(TOOLS, tool_choice="get_time").invoke("What time is it?")
    (call,) = answer.tool_calls
    assert call["name"] == "get_time"
    validate(call["args"], TIME)
    for method in ("json_schema", "function_calling"):
        assert isinstance(chat.with_structured_output(Zone, method=method).invoke("Name a zone."), Zone), method


# -- Anthropic ------------------------------------------------------------------------------------------------------

CLAUDE_TOOLS = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
CLAUDE = {"model": MODEL, "max_tokens": 120, "messages": ASKED, "extra_body": {"temperature": 0}}


@pytest.fixture
def claude(server):
    with anthropic.Anthropic(base_url=server, api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize(
    "choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "get_time"}]
)
def test_a_loop_of_tools(claude, choice):
    options = {**CLAUDE, "tools": CLAUDE_TOOLS, "tool_choice": choice}
    answer = claude.messages.create(**options)
    (use,) = answer.content
    assert (answer.stop_reason, use.type) == ("tool_use", "tool_use")
    validate(use.input, SCHEMAS[use.name])
    with claude.messages.stream(**options) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert [(one.name, one.input) for one in final.content] == [(use.name, use.input)]
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 1
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "12:30"}]}
    messages = [*ASKED, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    last = claude.messages.create(**{**CLAUDE, "messages": messages, "max_tokens": 10}, tools=CLAUDE_TOOLS)
    assert last.usage.input_tokens + (last.usage.cache_read_input_tokens or 0) > answer.usage.input_tokens
    counted = claude.messages.count_tokens(model=MODEL, messages=messages, tools=CLAUDE_TOOLS)
    assert counted.input_tokens == last.usage.input_tokens + (last.usage.cache_read_input_tokens or 0)
