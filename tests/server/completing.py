"""One completion as a client of a busy server asks for it, streamed or whole, and checked."""

import json

import httpx


async def complete(client: httpx.AsyncClient, body: dict) -> None:
    if not body["stream"]:
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == body["max_tokens"]
        return
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        lines = [line async for line in response.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    for event in map(json.loads, (line.removeprefix("data: ") for line in lines[:-1])):
        assert "error" not in event, event
        assert event["choices"][0]["finish_reason"] in (None, "length"), event
