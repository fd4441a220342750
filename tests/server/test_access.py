"""Who may call what, and how much anybody may send: attacks of strangers beside a client that behaves."""

import asyncio
import json
import socket
import time
from http.client import HTTPResponse

import httpx
import pytest
import uvicorn
from starlette.datastructures import Headers
from uvicorn.server import ServerState

from freehold.ipc.async_engine import AsyncEngine
from freehold.server.access.clients import Client
from freehold.server.access.connections import STANDSTILL_S, Connections
from freehold.server.access.keys import Keys
from freehold.server.access.rights import RIGHTS, Right, right_of
from freehold.server.access.usage import Quota, Usage
from freehold.server.app import create_app
from freehold.server.child import running_server
from freehold.server.config import ServerConfig
from freehold.server.served_models import ServedModels

KEYS = {"none": None, "wrong": "nonsense", "client": "first", "other": "second", "admin": "root"}
KEY_FILE = """
[[keys]]
name = "two"
key = "second"
[[keys]]
name = "three"
key = "third"
concurrency = 1
[[keys]]
name = "four"
key = "fourth"
salt = "apart"
"""
STATUS = {  # of a call that may not be made
    Right.OPEN: {},
    Right.CLIENT: {"none": 401, "wrong": 401},
    Right.ADMIN: {"none": 401, "wrong": 401, "client": 403, "other": 403},
}


def headers(who: str) -> dict[str, str]:
    return {} if KEYS[who] is None else {"Authorization": f"Bearer {KEYS[who]}"}


def routes() -> dict[str, list[str]]:
    """Methods by path, of every route of the application."""
    found: dict[str, list[str]] = {}

    def walk(some):
        for route in some:
            if hasattr(route, "original_router"):
                walk(route.original_router.routes)
            else:
                found.setdefault(route.path, []).extend(route.methods or [])

    walk(create_app(AsyncEngine(), ServedModels(("m",))).routes)
    return found


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys.write_text(KEY_FILE)
    flags = ("--api-key", "first", "--admin-api-key", "root", "--api-key-file", str(keys), "--num-pages", "200",
             "--max-connections-per-client", "40", "--header-timeout", "3", "--body-timeout", "3")  # fmt: skip
    with running_server(*flags) as url:
        yield url


def test_every_route_is_in_the_table_and_nothing_else():
    assert set(routes()) == set(RIGHTS)


@pytest.mark.parametrize("path", sorted(RIGHTS))
def test_who_may_call(guarded, path):
    """A body that cannot be read tells a call that is let in from one that is not: 400 or more, but no 401 or 403."""
    address = guarded + path.replace("{name:path}", "x").replace("{name}", "x")
    refusals = STATUS[RIGHTS[path]]
    for who in KEYS:
        for method in routes()[path]:
            if path in ("/pause_generation", "/flush_cache") and who not in refusals:
                continue  # allowed, and the others would feel it
            answer = httpx.request(method, address, headers=headers(who), timeout=30)
            expected = refusals.get(who)
            assert (answer.status_code == expected) if expected else answer.status_code not in (401, 403), (who, method)


def test_an_unknown_path_needs_a_key():
    assert right_of("/no/such/path") is Right.CLIENT
    assert right_of("/v1/cache/lookup") is Right.CLIENT
    assert right_of("/v1/cache/pins/a/b") is Right.ADMIN


def test_keys_that_can_not_be_are_refused_at_start(tmp_path):
    for config in (ServerConfig(api_key=("",)), ServerConfig(admin_api_key=" "), ServerConfig(api_key=("a", "a"))):
        with pytest.raises(ValueError, match="api_key"):
            Keys.of(config)
    file = tmp_path / "keys.toml"
    tables = ["name = 'a'", "key = 'a'\nrights = 1", "key = 'a'\nadmin = 1", "key = 'a'\nconcurrency = 0"]
    for content in ("", "x = 1", "not toml", *(f"[[keys]]\n{table}" for table in tables)):
        file.write_text(content)
        with pytest.raises(ValueError, match="api_key_file"):
            Keys.of(ServerConfig(api_key_file=str(file)))
    with pytest.raises(ValueError, match="api_key_file"):
        Keys.of(ServerConfig(api_key_file=str(tmp_path / "nowhere")))


def test_a_configuration_does_not_show_its_keys(tmp_path):
    keys = Keys.of(ServerConfig(api_key=("very-secret",), admin_api_key="most-secret"))
    assert "secret" not in repr(vars(keys))


def test_isolated_keys_have_salts_of_their_own():
    one, two = (
        Keys.of(ServerConfig(api_key=("a", "b"), isolate_keys=True)).find(Headers({"x-api-key": key})).client
        for key in ("a", "b")
    )
    assert "" != one.namespace("x") != two.namespace("x") != ""
    assert one.namespace("x") != one.namespace("y")
    shared = Keys.of(ServerConfig(api_key=("a",))).find(Headers({"x-api-key": "a"})).client
    assert shared.namespace(None) == ""


def test_no_cache_salt_leads_to_what_another_key_caches():
    salts = ["", "billing", "billing\0", "\0", "\0\0", "billing\0\0x", "x", "\0x"]
    clients = [Client(), Client("b", salt="billing"), Client("c", salt="c")]
    found = [client.namespace(salt) for client in clients for salt in salts]
    assert len({*found}) == len(found)


def test_what_a_key_with_a_salt_caches_is_its_own(guarded):
    def cached(key: str) -> int:
        body = {"prompt": list(range(300, 400)), "max_tokens": 1}
        answer = httpx.post(f"{guarded}/v1/completions", json=body, headers={"x-api-key": key}, timeout=60)
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert (cached("first"), cached("second")) == (0, 96)
    assert (cached("fourth"), cached("fourth")) == (0, 96)


def test_a_quota_fills_again():
    now = 0.0
    usage = Usage(Quota(requests_per_minute=2, tokens_per_minute=100), lambda: now)
    usage.begin()
    usage.begin()
    with pytest.raises(Exception, match="requests_per_minute") as refused:
        usage.begin()
    assert refused.value.retry_after == pytest.approx(30)
    now = 30.0
    usage.begin()
    usage.spend(300)
    now = 60.0
    with pytest.raises(Exception, match="tokens_per_minute"):
        usage.begin()
    now = 60.0 + 120.0 + 1.0
    usage.begin()


def complete(url: str, who: str, **fields) -> httpx.Response:
    body = {"prompt": "One two three", "max_tokens": 2, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers(who), timeout=60)


def test_each_key_has_a_share_of_its_own(guarded):
    shares = {}
    for who in ("client", "other"):
        answer = complete(guarded, who).json()["id"]
        found = httpx.get(f"{guarded}/debug/requests/{answer}", headers=headers("admin"))
        shares[who] = found.json()["client"]
    assert shares["other"] == "two", "the name in the file"
    assert shares["client"] not in ("", "two"), "a digest of the key"


def test_a_key_may_have_one_request_at_a_time(guarded):
    third = {"Authorization": "Bearer third"}
    body = {"prompt": "count", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{guarded}/v1/completions", json=body, headers=third, timeout=60) as running:
        lines = running.iter_lines()
        next(lines)
        refused = httpx.post(f"{guarded}/v1/completions", json={"prompt": "a"}, headers=third, timeout=60)
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(refused.headers["retry-after"]) >= 1
    for _ in range(100):
        if (
            httpx.post(f"{guarded}/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=third).status_code
            == 200
        ):
            break
        time.sleep(0.05)
    else:
        raise AssertionError("the request that was left counts for ever")


def test_one_client_ends_none_of_anothers_requests(guarded):
    body = {
        "text": "count",
        "sampling_params": {"max_new_tokens": 600, "ignore_eos": True},  # it still runs when the others have asked
        "rid": "mine",
        "stream": True,
    }
    with httpx.stream("POST", f"{guarded}/generate", json=body, headers=headers("client"), timeout=60) as running:
        lines = running.iter_lines()
        next(lines)
        for rid in ("mine", "m", ""):
            httpx.post(f"{guarded}/abort_request", json={"rid": rid}, headers=headers("other"))
        refused = httpx.post(f"{guarded}/abort_request", json={"abort_all": True}, headers=headers("other"))
        assert refused.status_code == 403
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "length"
    with httpx.stream("POST", f"{guarded}/generate", json=body, headers=headers("client"), timeout=60) as running:
        lines = running.iter_lines()
        next(lines)
        httpx.post(f"{guarded}/abort_request", json={"rid": "mine"}, headers=headers("client"))
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "abort"


def test_two_clients_may_have_sessions_of_one_name(guarded):
    for who in ("client", "other"):
        opened = httpx.post(f"{guarded}/v1/sessions", json={"session_id": "work"}, headers=headers(who))
        assert opened.status_code == 200, opened.text
    assert complete(guarded, "client", session_id="work").status_code == 200
    turns = {
        who: httpx.get(f"{guarded}/v1/sessions/work", headers=headers(who)).json()["turns"]
        for who in ("client", "other")
    }
    assert turns == {"client": 1, "other": 0}
    again = httpx.post(f"{guarded}/v1/sessions", json={"session_id": "work"}, headers=headers("client"))
    assert again.status_code == 409
    for who in ("client", "other"):
        assert httpx.delete(f"{guarded}/v1/sessions/work", headers=headers(who)).json()["deleted"] is True
    assert httpx.delete(f"{guarded}/v1/sessions/work", headers=headers("admin")).status_code == 404


@pytest.mark.parametrize("name", ["a/b", "", " ", "x" * 201, "\n", "é"])
def test_a_session_that_could_not_be_closed_is_not_opened(guarded, name):
    opened = httpx.post(f"{guarded}/v1/sessions", json={"session_id": name}, headers=headers("client"))
    assert (opened.status_code, opened.json()["error"]["param"]) == (400, "session_id")


@pytest.mark.parametrize("who", ["none", "wrong"])
def test_nothing_is_read_without_a_key(guarded, who):
    """A hundred megabytes are promised, and refused before any has arrived."""
    host, port = guarded.removeprefix("http://").split(":")
    key = "" if KEYS[who] is None else f"Authorization: Bearer {KEYS[who]}\r\n"
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{key}Content-Length: 100000000\r\n\r\n".encode()
        )
        assert connection.recv(1000).startswith(b"HTTP/1.1 401")


def status_of(connection: socket.socket) -> int:
    """That of the next answer, which is read."""
    answer = HTTPResponse(connection)
    answer.begin()
    answer.read()
    return answer.status


def test_a_refusal_can_be_read_by_a_client_that_still_sends(guarded):
    """Its body is thrown away, and the connection goes on. A body that does not end is not waited for."""
    host, port = guarded.removeprefix("http://").split(":")
    whole, half = (socket.create_connection((host, int(port)), timeout=10) for _ in range(2))
    with whole, half:
        for connection, parts in ((whole, (150, 50)), (whole, (200,)), (half, (150,))):
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 200\r\n\r\n")
            assert status_of(connection) == 401
            for size in parts:
                connection.sendall(b"x" * size)
        assert half.recv(1000) == b"", "closed after the time in which headers must come"
        whole.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert status_of(whole) == 200


def test_a_client_that_stood_still_with_the_server_has_its_time_anew():
    """As in a machine that was suspended."""

    async def answer(scope, receive, send):
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async def ask() -> bytes:
        config = uvicorn.Config(answer, lifespan="off")
        config.load()
        settings = {"config": config, "server_state": ServerState(), "app_state": {}}
        limits = Connections(9, 9, 0.05)
        async with await asyncio.get_running_loop().create_server(
            lambda: limits.protocol(**settings), "127.0.0.1", 0
        ) as server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            await asyncio.sleep(0)
            while not len(limits):
                await asyncio.sleep(0)
            time.sleep(0.05 + 1.2 * STANDSTILL_S)  # the loop stands still
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            found = await reader.readline()
            writer.close()
            return found

    assert asyncio.run(ask()).startswith(b"HTTP/1.1 204")


def test_connections_are_counted_in_all_and_by_address_and_nothing_is_kept_of_those_that_ended():
    limits = Connections(5, 2, 1.0)
    for _ in range(3):
        assert [limits.add(address) for address in "aaabbbcc"] == [True, True, False, True, True, False, True, False]
        assert len(limits) == 5
        for left, address in zip((4, 3, 2, 1, 0), "aabbc", strict=True):
            limits.remove(address)
            assert len(limits) == left
        assert not limits._open


def test_large_bodies_are_refused_with_and_without_a_length(guarded):
    body = json.dumps({"prompt": "a " * 3_000_000}).encode()
    for content in (body, iter([body[at : at + 65536] for at in range(0, len(body), 65536)])):
        answer = httpx.post(f"{guarded}/v1/completions", content=content, headers={
            **headers("client"), "Content-Type": "application/json"}, timeout=30)  # fmt: skip
        assert (answer.status_code, answer.json()["error"]["type"]) == (413, "request_too_large")


def test_a_prompt_that_can_not_fit_is_refused_before_it_is_tokenized(guarded):
    started = time.monotonic()
    answer = complete(guarded, "client", prompt="a " * 1_500_000)
    assert answer.status_code == 400
    assert "maximum context length" in answer.json()["error"]["message"]
    assert time.monotonic() - started < 10


def test_outputs_of_a_request_are_bounded(guarded):
    for fields in ({"n": 128, "prompt": ["a", "b", "c"]}, {"prompt": ["a"] * 300}):
        answer = complete(guarded, "client", **fields)
        assert answer.status_code == 400
        assert "the limit is 256" in answer.json()["error"]["message"]
    body = {"text": ["a"] * 300, "sampling_params": {"max_new_tokens": 1}}
    assert httpx.post(f"{guarded}/generate", json=body, headers=headers("client")).status_code == 400


def test_connections_without_a_request_are_closed(guarded):
    host, port = guarded.removeprefix("http://").split(":")
    idle = [socket.create_connection((host, int(port)), timeout=10) for _ in range(30)]
    for number, connection in enumerate(idle):
        if number % 2:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHo")
    assert httpx.get(f"{guarded}/health").status_code == 200
    for connection in idle:
        assert connection.recv(100) == b"", "closed, and not a word"
        connection.close()


def test_a_body_that_does_not_come_is_not_waited_for(guarded):
    host, port = guarded.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                           b"Authorization: Bearer first\r\nContent-Length: 1000\r\n\r\n{")  # fmt: skip
        assert connection.recv(1000).startswith(b"HTTP/1.1 408")


def test_one_address_has_so_many_connections(guarded):
    host, port = guarded.removeprefix("http://").split(":")
    many = [socket.create_connection((host, int(port)), timeout=10) for _ in range(60)]
    refused = sum(connection.recv(12) == b"HTTP/1.1 503" for connection in many[40:])
    for connection in many:
        connection.close()
    assert refused >= 20
    assert httpx.get(f"{guarded}/health", timeout=10).status_code == 200


SURROGATE = '"\\ud83d"'


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", '{"prompt": %s}'),
        ("/v1/completions", '{"prompt": "a", "stop": [%s]}'),
        ("/v1/completions", '{"prompt": "a", "cache_salt": %s}'),
        ("/v1/chat/completions", '{"messages": [{"role": "user", "content": %s}]}'),
        ("/v1/messages", '{"max_tokens": 1, "messages": [{"role": "user", "content": %s}]}'),
        ("/generate", '{"text": %s}'),
        ("/generate", '{"text": "a", "rid": %s}'),
        ("/tokenize", '{"prompt": %s}'),
        ("/v1/sessions", '{"session_id": %s}'),
    ],
)
def test_half_of_a_surrogate_pair_is_refused(guarded, path, body):
    answer = httpx.post(guarded + path, content=(body % SURROGATE).encode(), timeout=30, headers={
        **headers("client"), "Content-Type": "application/json"})  # fmt: skip
    assert answer.status_code == 400, answer.text


def test_nesting_without_end_is_refused(guarded):
    answer = httpx.post(f"{guarded}/v1/completions", content=b"[" * 100_000, timeout=30, headers={
        **headers("client"), "Content-Type": "application/json"})  # fmt: skip
    assert answer.status_code == 400


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        ("/v1/completions", {"lora_request": {"lora_name": "a"}}, "lora_request"),
        ("/v1/completions", {"logit_bias": {"99999999": 1}}, "logit_bias"),
        ("/v1/chat/completions", {"functions": [{"name": "f"}]}, "functions"),
        ("/v1/chat/completions", {"continue_final_message": True}, "continue_final_message"),
        ("/v1/chat/completions", {"messages": [{"role": "nobody", "content": "a"}]}, "messages"),
        ("/generate", {"sampling_params": {"logit_bias": {"99999999": 1}}}, "logit_bias"),
    ],
)
def test_what_would_change_the_answer_is_refused_not_ignored(guarded, path, fields, field):
    bodies = {
        "/v1/completions": {"prompt": "a"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
        "/generate": {"text": "a"},
    }
    answer = httpx.post(guarded + path, json={"max_tokens": 1, **bodies[path], **fields}, headers=headers("client"))
    assert answer.status_code == 400, answer.text
    assert field in answer.json()["error"]["message"]
    empty = {name: type(value)() for name, value in fields.items() if name not in ("messages", "sampling_params")}
    answer = httpx.post(
        guarded + path, json={"max_tokens": 1, **bodies[path], **empty}, headers=headers("client"), timeout=60
    )
    assert answer.status_code == 200, answer.text
