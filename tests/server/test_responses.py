"""The Responses API, with the real client."""

import asyncio
import json
import time

import httpx
import openai
import pytest
from jsonschema import validate
from opened_sessions import Clock
from pydantic import BaseModel

from freehold.contract.errors import NotFound
from freehold.server.database import open_database
from freehold.server.responses import store as stores
from freehold.server.responses.store import ResponseStore, StoredResponse

MODEL = "SmolLM2-135M-Instruct"
OPTIONS = {"model": MODEL, "temperature": 0, "max_output_tokens": 12}
SCHEMA = {
    "type": "object",
    "properties": {"zone": {"enum": ["CET", "UTC"]}},
    "required": ["zone"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "name": "get_time", "description": "The time.", "parameters": SCHEMA, "strict": True}


class Zone(BaseModel):
    zone: str


def test_a_response_is_what_chat_completions_say(client):
    response = client.responses.create(**OPTIONS, instructions="Be brief.", input="Name a river.")
    chat = client.chat.completions.create(
        model=MODEL,
        temperature=0,
        max_tokens=12,
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a river."}],
    )
    assert response.output_text == chat.choices[0].message.content
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == chat.usage.completion_tokens
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_a_stream_says_the_same_in_order(client):
    whole = client.responses.create(**OPTIONS, input="Name a river.")
    with client.responses.stream(**OPTIONS, input="Name a river.") as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events if event.type != "response.output_text.delta"]
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    assert events[-1].response.output_text == whole.output_text


def test_a_response_is_gone_on_from_as_often_as_one_likes(client):
    first = client.responses.create(**OPTIONS, input="My name is Ada. Say hello.")
    ways = [
        client.responses.create(**OPTIONS, input=text, previous_response_id=first.id)
        for text in ("What is my name?", "What is my name?", "Count to three.")
    ]
    assert ways[0].output_text == ways[1].output_text
    seen = first.usage.input_tokens + first.usage.output_tokens
    assert ways[0].usage.input_tokens_details.cached_tokens >= seen - 16, "tokens are as they were sampled"
    chat = [
        {"role": "user", "content": "My name is Ada. Say hello."},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "What is my name?"},
    ]
    same = client.responses.create(**OPTIONS, input=chat)
    assert same.output_text == ways[0].output_text
    third = client.responses.create(**OPTIONS, input="And now?", previous_response_id=ways[2].id)
    assert third.previous_response_id == ways[2].id
    changed = client.responses.create(
        **OPTIONS, input="What is my name?", previous_response_id=first.id, instructions="Speak like a pirate."
    )
    cold = client.responses.create(**OPTIONS, input=chat, instructions="Speak like a pirate.")
    assert (changed.output_text, changed.usage.input_tokens) == (cold.output_text, cold.usage.input_tokens)


def test_calls_and_their_results(client):
    tools = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    first = client.responses.create(**{**OPTIONS, "max_output_tokens": 60}, input="What time is it?", **tools)
    (call,) = first.output
    assert (first.status, call.type, call.name) == ("completed", "function_call", "get_time")
    validate(json.loads(call.arguments), SCHEMA)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "12:30"}
    second = client.responses.create(**OPTIONS, input=[result], previous_response_id=first.id, tools=[TOOL])
    assert second.output_text or second.output
    by_hand = client.responses.create(
        **OPTIONS, input=[{"role": "user", "content": "What time is it?"}, call.model_dump(), result], tools=[TOOL]
    )
    assert by_hand.output_text == second.output_text
    with client.responses.stream(**{**OPTIONS, "max_output_tokens": 60}, input="What time is it?", **tools) as stream:
        kinds = [event.type for event in stream]
        (streamed,) = stream.get_final_response().output
    assert streamed.arguments == call.arguments
    assert "response.function_call_arguments.delta" in kinds


def test_the_text_can_be_bound(client):
    parsed = client.responses.parse(**{**OPTIONS, "max_output_tokens": 60}, input="A zone, as JSON.", text_format=Zone)
    assert isinstance(parsed.output_parsed, Zone)


def test_responses_are_kept_until_they_are_deleted(client, server):
    made = client.responses.create(**OPTIONS, input="Hello", metadata={"of": "me"})
    assert client.responses.retrieve(made.id).output_text == made.output_text
    assert [item.content for item in client.responses.input_items.list(made.id)] == ["Hello"]
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(made.id)
    client.responses.delete(made.id)
    hidden = client.responses.create(**OPTIONS, input="Hello", store=False)
    for name in (made.id, hidden.id):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(name)
        with pytest.raises(openai.NotFoundError) as lost:
            client.responses.create(**OPTIONS, input="Hello", previous_response_id=name)
        assert lost.value.param == "previous_response_id"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "x"}]}, "input.tool_call_id"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}}, "text.format.schema"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "river " * 9000}, "input"),
    ],
)
def test_what_can_not_be_done_is_said_by_its_field(server, change, param):
    answer = httpx.post(f"{server}/v1/responses", json={**OPTIONS, "input": "Hello", **change}, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"].replace("response_format.json_schema", "text.format")) == (400, param)


def stored(name, size=10):
    return StoredResponse({"id": name}, [{"id": "i"}], [{"role": "user", "content": "x" * size}], [1, 2, 3])


class Stored:
    """A store, whose calls run to their end."""

    def __init__(self, path=None, ttl=60.0, clock=time.monotonic):
        self.database = open_database(path, [ResponseStore.tables])
        self.store = ResponseStore(self.database, ttl, clock)

    def put(self, response, owner):
        asyncio.run(self.store.put(response, owner))

    def get(self, name, owner):
        return asyncio.run(self.store.get(name, owner))


def test_points_of_histories_are_bounded_and_their_owners(tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "POINTS_MAX", 3)
    monkeypatch.setattr(stores, "BYTES_MAX", 4000)
    path = str(tmp_path / "store.sqlite")
    store = Stored(path)
    for i in range(5):
        store.put(stored(f"r{i}"), "ada")
    assert store.get("r4", "ada") == store.get("r4", None) == stored("r4")
    for name, owner in (("r1", "ada"), ("r4", "bob")):
        with pytest.raises(NotFound):
            store.get(name, owner)
    store.database.close()
    again = Stored(path)
    assert again.get("r4", "ada").tokens == [1, 2, 3]
    again.put(stored("large", 3800), "ada")
    with pytest.raises(NotFound):
        again.get("r4", "ada")
    asyncio.run(again.store.delete("large"))
    again.database.close()


@pytest.mark.parametrize(("points", "size"), [(10, 1 << 20), (1000, 4000)])
def test_no_client_pushes_out_what_another_has_stored(monkeypatch, points, size):
    monkeypatch.setattr(stores, "POINTS_MAX", points)
    monkeypatch.setattr(stores, "BYTES_MAX", size)
    store = Stored()
    for i in range(2):
        store.put(stored(f"b{i}"), "bob")
    for i in range(100):
        store.put(stored(f"e{i}"), "eve")
    assert store.get("b0", "bob") == stored("b0")
    assert store.get("b1", "bob") == stored("b1")
    assert store.get("e99", "eve") == stored("e99")
    with pytest.raises(NotFound):
        store.get("e0", "eve")
    store.database.close()


def test_a_response_is_kept_for_its_time_on_the_monotonic_clock(tmp_path, monkeypatch):
    path, clock = str(tmp_path / "store.sqlite"), Clock()
    store = Stored(path, 60, clock)
    store.put(stored("r"), "ada")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 1e9)
    clock.now += 59
    assert store.get("r", "ada") == stored("r")
    store.database.close()
    clock.now = 5.0  # a machine that has started again: never less time than was promised
    store = Stored(path, 60, clock)
    clock.now += 59
    assert store.get("r", "ada") == stored("r")
    clock.now += 2
    with pytest.raises(NotFound):
        store.get("r", "ada")
    store.put(stored("next"), "ada")
    assert store.database.submit(lambda it: it.execute("SELECT id FROM responses").fetchall()).result() == [("next",)]
    store.database.close()
    assert Stored().store._clock is time.monotonic
