"""Sessions over HTTP: turns, aborts, forks, rewinds, closing, expiry, and a kill."""

import itertools
import json
import os
import re
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection

import httpx
import pytest
from openai import OpenAI

from freehold.server.child import running_server


@pytest.fixture(scope="module")
def client(url):
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


def open_session(client, **settings) -> str:
    answer = client.post("/v1/sessions", json=settings)
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


def turn(client, session, prompt, **fields):
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "session_id": session, **fields}
    return client.post("/v1/completions", json=body)


def cold(client, tokens, count=6):
    """The same tokens without session and without cache."""
    body = {"prompt": tokens, "max_tokens": count, "temperature": 0, "ignore_eos": True, "cache_salt": str(time.time())}
    answer = client.post("/v1/completions", json=body).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    return answer["choices"][0]["text"]


def ids(client, text):
    return client.post("/tokenize", json={"prompt": text}).json()["tokens"]


def test_turns_continue_exactly_and_compute_only_what_is_new(client):
    session = open_session(client)
    history = []
    for i, text in enumerate(["The river runs past the old library", " and then", " because of", " a"]):
        new = ids(client, text)
        answer = turn(client, session, new)
        assert answer.status_code == 200, answer.text
        body = answer.json()
        assert body["session_id"] == session
        assert body["usage"]["prompt_tokens"] == len(history) + len(new)
        if i:
            assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == len(history) - 1
        text = body["choices"][0]["text"]
        assert text == cold(client, [*history, *new])
        card = client.get(f"/v1/sessions/{session}", params={"token_ids": True}).json()
        assert card["token_ids"][:-6] == [*history, *new]
        history = card["token_ids"]
        assert card["tokens"] == len(history)
        assert card["cached"]["tokens"] == len(history) - 1
        assert card["cached"]["tree_tokens"] % 16 == 0
    assert client.delete(f"/v1/sessions/{session}").json()["deleted"] is True
    assert client.get(f"/v1/sessions/{session}").status_code == 404


def test_one_turn_at_a_time_unless_asked_to_wait(client):
    session = open_session(client)
    answers = []
    first = threading.Thread(target=lambda: answers.append(turn(client, session, "Once", max_tokens=120)))
    first.start()
    wait_for(lambda: client.get(f"/v1/sessions/{session}").json()["active"])
    second = turn(client, session, "Twice")
    assert second.status_code == 409
    assert "active request" in second.json()["error"]["message"]
    third = turn(client, session, " upon", session_wait=True)
    first.join()
    assert answers[0].status_code == third.status_code == 200
    assert third.json()["usage"]["prompt_tokens"] == answers[0].json()["usage"]["total_tokens"] + 1


LONG = "-" * 20_000  # tokenized in a thread; few tokens


def chat(client, session, text, **fields):
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0}
    return client.post("/v1/chat/completions", json={**body, "session_id": session, "session_wait": True, **fields})


def test_long_turns_that_wait_are_all_answered(client):
    session = open_session(client)
    with ThreadPoolExecutor(5) as threads:
        answers = list(threads.map(lambda number: chat(client, session, f"{number}{LONG}"), range(5)))
    assert [answer.status_code for answer in answers] == [200] * 5
    used = sorted((answer.json()["usage"] for answer in answers), key=lambda usage: usage["prompt_tokens"])
    for before, after in itertools.pairwise(used):
        assert after["prompt_tokens"] > before["total_tokens"], "each saw all that were before it"
    card = client.get(f"/v1/sessions/{session}", params={"token_ids": True}).json()
    assert (card["turns"], card["tokens"]) == (5, used[-1]["total_tokens"])
    text = client.post("/detokenize", json={"tokens": card["token_ids"]}).json()["prompt"]
    assert sorted(re.findall(r"user\n(\d)-", text)) == list("01234")
    client.delete(f"/v1/sessions/{session}")


@pytest.fixture
def busy(client):
    """A session with a turn in flight, and what adds one to its line -> a future of its answer."""
    session = open_session(client, capacity=2000)
    with ThreadPoolExecutor(8) as threads:
        first = threads.submit(turn, client, session, "Once", max_tokens=1900)
        wait_for(lambda: client.get(f"/v1/sessions/{session}").json()["active"])

        def add(send=turn, *arguments, **fields):
            before = client.get(f"/v1/sessions/{session}").json()["waiting"]
            answer = threads.submit(send, client, session, *arguments, session_wait=True, **fields)
            wait_for(lambda: client.get(f"/v1/sessions/{session}").json()["waiting"] == before + 1)
            return answer

        yield session, first, add
        client.delete(f"/v1/sessions/{session}", params={"abort": True})


def end(client, answer):
    """End the only turn that runs."""
    client.post("/abort_request", json={"abort_all": True})
    assert answer.result().json()["choices"][0]["finish_reason"] == "abort"


def test_turns_come_in_the_order_of_their_arrival(client, busy):
    session, first, add = busy
    long = add(chat, LONG)
    refused = add(turn, [1] * 2000)
    short = add(turn, " two")
    native = {"text": "x", "session_params": {"id": session}}
    assert client.post("/generate", json=native).status_code == 400
    assert chat(client, session, "x", n=2).json()["error"]["param"] == "n"
    end(client, first)
    assert "capacity is 2000" in refused.result().json()["error"]["message"]
    assert short.result().json()["usage"]["prompt_tokens"] == long.result().json()["usage"]["total_tokens"] + 1


def test_a_turn_that_waits_may_leave_and_runs_out_of_time(client, url, busy):
    session, first, add = busy
    assert "timed out" in turn(client, session, "x", session_wait=True, timeout=0.1).json()["error"]["message"]
    leaver = HTTPConnection(url.removeprefix("http://"))
    body = {"prompt": "x", "session_id": session, "session_wait": True}
    leaver.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    wait_for(lambda: client.get(f"/v1/sessions/{session}").json()["waiting"] == 1)
    last = add(turn, " two")
    leaver.close()
    wait_for(lambda: client.get(f"/v1/sessions/{session}").json()["waiting"] == 1)
    end(client, first)
    assert last.result().json()["usage"]["prompt_tokens"] == 1


def test_closing_refuses_turns_that_wait(client, busy):
    session, first, add = busy
    waiting = [add(turn, "x"), add(chat, "x")]
    client.delete(f"/v1/sessions/{session}")
    for answer in waiting:
        assert answer.result().status_code == 409
        assert "close was requested" in answer.result().json()["error"]["message"]
    assert not first.done()
    end(client, first)


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.4])
def test_an_abandoned_turn_leaves_no_trace_at_any_stage(client, url, delay):
    session = open_session(client)
    for number in range(2):
        patience = httpx.Timeout(60, read=delay or 0.001)
        with httpx.Client(base_url=url, timeout=patience) as leaver, pytest.raises(httpx.ReadTimeout):
            turn(leaver, session, "Never to be seen " * 30, max_tokens=400)
        expected = number * (4 + 6)
        wait_for(lambda: not client.get(f"/v1/sessions/{session}").json()["active"])
        assert client.get(f"/v1/sessions/{session}").json()["tokens"] == expected
        answer = turn(client, session, [504, 7235, 314, 28])
        assert answer.json()["usage"]["prompt_tokens"] == expected + 4
    client.delete(f"/v1/sessions/{session}")


def wait_for(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def test_sessions_are_listed_in_parts(client):
    opened = [open_session(client) for _ in range(5)]
    listed, has_more, after = [], True, {}
    while has_more:
        answer = client.get("/v1/sessions", params={"limit": 2, **after}).json()
        part, has_more = [session["id"] for session in answer["data"]], answer["has_more"]
        assert 0 < len(part) <= 2
        listed, after = listed + part, {"after": part[-1]}
    assert listed[-5:] == opened
    whole = client.get("/v1/sessions").json()
    assert [session["id"] for session in whole["data"]] == listed
    assert not whole["has_more"]
    assert client.get("/v1/sessions", params={"after": "nobody"}).status_code == 404
    for limit in (0, 1001):
        assert client.get("/v1/sessions", params={"limit": limit}).status_code == 400


def test_the_native_api_keeps_to_the_capacity_of_a_session(client):
    session = open_session(client, capacity=20)
    body = {
        "input_ids": [504, 7235, 314, 28],
        "sampling_params": {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True},
        "session_params": {"id": session},
    }
    answer = client.post("/generate", json=body)
    assert answer.json()["meta_info"]["completion_tokens"] == 16
    assert client.post("/generate", json=body | {"input_ids": [1] * 21}).status_code == 400


def test_a_refused_turn_changes_nothing(client):
    session = open_session(client, capacity=20)
    turn(client, session, [504, 7235, 314, 28])
    before = client.get(f"/v1/sessions/{session}").json()
    too_long = turn(client, session, [1] * 30)
    assert too_long.status_code == 400
    assert "capacity is 20" in too_long.json()["error"]["message"]
    assert turn(client, session, [5], max_tokens=-1).status_code == 400
    assert turn(client, session, [5], n=2).json()["error"]["param"] == "n"
    assert turn(client, session, [10**7]).status_code == 400
    assert turn(client, "nobody", [5]).status_code == 404
    after = client.get(f"/v1/sessions/{session}").json()
    assert {**after, "last_used": 0} == {**before, "last_used": 0}
    assert turn(client, session, [5]).status_code == 200


def test_fork_and_rewind(client):
    session = open_session(client)
    first = ids(client, "The story begins in a small town by the sea, where")
    turn(client, session, first)
    fork = client.post(f"/v1/sessions/{session}/fork", json={}).json()
    assert fork["tokens"] == len(first) + 6
    one = turn(client, session, " one").json()["choices"][0]["text"]
    two = turn(client, fork["id"], " two").json()["choices"][0]["text"]
    again = client.post(f"/v1/sessions/{session}/rewind", json={"to": len(first) + 6})
    assert again.json()["tokens"] == len(first) + 6
    assert turn(client, session, " two").json()["choices"][0]["text"] == two
    assert client.post(f"/v1/sessions/{session}/rewind", json={"to": len(first) + 6}).status_code == 200
    assert turn(client, session, " one").json()["choices"][0]["text"] == one
    assert client.post(f"/v1/sessions/{session}/rewind", json={"to": 10**6}).status_code == 400


def test_closing_during_a_turn(client):
    for abort in (False, True):
        session = open_session(client)
        answers = []

        def run(name=session, found=answers):
            found.append(turn(client, name, "Once upon a time", max_tokens=120))

        thread = threading.Thread(target=run)
        thread.start()
        wait_for(lambda name=session: client.get(f"/v1/sessions/{name}").json()["active"])
        assert client.delete(f"/v1/sessions/{session}", params={"abort": abort}).json()["deleted"] is abort
        assert turn(client, session, "more").status_code in (404, 409)
        thread.join()
        assert answers[0].json()["choices"][0]["finish_reason"] == ("abort" if abort else "length")
        wait_for(lambda name=session: client.get(f"/v1/sessions/{name}").status_code == 404)


def test_idle_sessions_expire(client):
    session = open_session(client, timeout=0.5)
    assert client.get(f"/v1/sessions/{session}").status_code == 200
    wait_for(lambda: client.get(f"/v1/sessions/{session}").status_code == 404)


def test_a_chat_session_takes_only_the_new_messages(url, client):
    openai = OpenAI(base_url=f"{url}/v1", api_key="none")
    session = open_session(client)
    messages = []
    for text in ("My name is Ada. Remember it.", "What is my name?", "Say it backwards."):
        new = {"role": "user", "content": text}
        messages.append(new)
        whole = openai.chat.completions.create(model="m", messages=messages, temperature=0, max_tokens=24)
        mine = openai.chat.completions.create(
            model="m", messages=[new], temperature=0, max_tokens=24, extra_body={"session_id": session}
        )
        assert mine.choices[0].message.content == whole.choices[0].message.content
        assert mine.usage.prompt_tokens == whole.usage.prompt_tokens
        if len(messages) > 1:
            assert mine.usage.prompt_tokens_details.cached_tokens
        messages.append({"role": "assistant", "content": whole.choices[0].message.content})


def test_sessions_survive_a_kill(tmp_path):
    """kill -9 of server and engine; the next turn continues with identical output."""
    flags = ("--session-store", str(tmp_path / "sessions.db"), "--num-pages", "100")
    with running_server(*flags) as url, httpx.Client(base_url=url, timeout=60) as client:
        session = open_session(client, cache_salt="mine")
        turn(client, session, "The river runs")
        tokens = client.get(f"/v1/sessions/{session}").json()["tokens"]
        pid = subprocess.run(["pgrep", "-f", f"serve --port {url.rpartition(':')[2]}"], capture_output=True, text=True)
        os.kill(int(pid.stdout.split()[0]), signal.SIGKILL)
    with running_server(*flags) as url, httpx.Client(base_url=url, timeout=60) as client:
        card = client.get(f"/v1/sessions/{session}").json()
        assert (card["tokens"], card["turns"]) == (tokens, 1)
        answer = turn(client, session, " past").json()
        assert answer["usage"]["prompt_tokens"] == tokens + 1
        fresh = open_session(client)
        turn(client, fresh, "The river runs")
        assert turn(client, fresh, " past").json()["choices"][0]["text"] == answer["choices"][0]["text"]
        client.delete(f"/v1/sessions/{session}")
