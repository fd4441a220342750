"""What an operator can choose: names, origins, TLS, sockets, prefixes, templates."""

import contextlib
import shutil
import ssl
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import orjson
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from starlette.testclient import TestClient

from freehold import LLM, SamplingParams
from freehold.contract.errors import ChatTemplateError, NotFound
from freehold.ipc.async_engine import AsyncEngine
from freehold.server.access.log import Record
from freehold.server.access.traces import Traces
from freehold.server.app import create_app
from freehold.server.child import free_port
from freehold.server.config import ServerConfig
from freehold.server.requests.response import OPENAI_EVENTS
from freehold.server.served_models import ServedModels
from freehold.text.loading import load_tokenizer

ASK = {"messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 2, "temperature": 0}


@contextlib.contextmanager
def served(command: list):
    process = subprocess.Popen(list(map(str, command)))
    try:
        yield
    finally:
        process.terminate()
        assert process.wait(40) == 0


def wait_until_healthy(client: httpx.Client) -> None:
    for _ in range(600):
        with contextlib.suppress(httpx.HTTPError):
            if client.get("/health").status_code == 200:
                return
        time.sleep(0.1)
    raise AssertionError("the server does not serve")


@pytest.fixture(scope="module")
def proxied(tmp_path_factory):
    """A server with TLS under a prefix, for pages of one origin -> (its port, its certificate)."""
    folder = tmp_path_factory.mktemp("tls")
    key, certificate, template = folder / "key.pem", folder / "certificate.pem", folder / "template.jinja"
    if shutil.which("openssl") is None:
        pytest.fail("the test of TLS needs openssl")
    subject = ("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2")
    make = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate, *subject)
    subprocess.run(make, check=True, capture_output=True)
    template.write_text("{% for message in messages %}[{{ message.content }}]{% endfor %}{{ bos_token }}")
    port = free_port()
    command = [sys.executable, "-m", "freehold", "serve", "--port", str(port),
               "--ssl-keyfile", key, "--ssl-certfile", certificate, "--root-path", "/llm",
               "--allowed-origins", "https://app.example", "--served-model-name", "small",
               "--served-model-name", "alias", "--api-key", "client", "--admin-api-key", "root",
               "--chat-template", template, "--num-pages", "100", "--max-model-len", "512"]  # fmt: skip
    context = ssl.create_default_context(cafile=certificate)
    with (
        served(command),
        httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=context, timeout=30) as client,
    ):
        wait_until_healthy(client)
        yield client


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


def test_a_model_is_known_by_its_names(proxied):
    assert [card["id"] for card in proxied.get("/v1/models", headers=key("client")).json()["data"]] == [
        "small",
        "alias",
    ]
    for name, shown in ((None, "small"), ("small", "small"), ("alias", "alias")):
        answer = proxied.post("/v1/chat/completions", json={**ASK, "model": name}, headers=key("client"))
        assert (answer.status_code, answer.json()["model"]) == (200, shown)
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages"):
        body = {**ASK, "prompt": "a", "model": "gpt-5"}
        answer = proxied.post(path, json=body, headers=key("client"))
        assert answer.status_code == 404, path
        assert "'gpt-5' does not exist; this server has 'small'" in answer.json()["error"]["message"]


def test_any_name_is_served_if_that_is_wanted():
    assert ServedModels(("a",), allows_any=True).choose("b").name == "b"
    with pytest.raises(NotFound):
        ServedModels(("a",)).choose("b")


def test_a_prefix_gives_no_rights(proxied):
    """The proxy takes it off; what is left decides."""
    assert proxied.post("/flush_cache", headers=key("client")).status_code == 403
    assert proxied.post("/flush_cache", headers=key("root")).status_code == 200
    assert proxied.get("/v1/models").status_code == 401
    assert proxied.get("/llm/health").status_code == 401


def test_a_browser_may_ask_from_the_origins_that_are_allowed(proxied):
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    allowed = proxied.options("/v1/models", headers={**ask, "Origin": "https://app.example"})
    assert allowed.headers["access-control-allow-origin"] == "https://app.example"
    other = proxied.options("/v1/models", headers={**ask, "Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers
    answer = proxied.get("/v1/models", headers={**key("client"), "Origin": "https://app.example"})
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()


def test_the_template_is_the_one_that_was_given(proxied):
    body = {"model": "small", "messages": ASK["messages"]}
    count = proxied.post("/v1/messages/count_tokens", json=body, headers=key("client")).json()["input_tokens"]
    text = proxied.post("/tokenize", json={"prompt": "[Say hi.]", "add_special_tokens": False}, headers=key("client"))
    assert count == len(text.json()["tokens"]) + 1, "the text in brackets, and bos_token"


def test_a_template_that_can_not_be_read_is_refused(checkpoint, tmp_path):
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for %}")
    for file in (broken, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match=f"chat_template: {file}"):
            load_tokenizer(checkpoint, str(file))


def test_a_unix_socket(tmp_path):
    path = tmp_path / "socket"
    with (
        served([sys.executable, "-m", "freehold", "serve", "--uds", path, "--num-pages", "50"]),
        httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://freehold") as client,
    ):
        wait_until_healthy(client)
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("options", [
    {"ssl_keyfile": "key.pem"}, {"root_path": "llm"}, {"root_path": "/llm/"},
])  # fmt: skip
def test_options_that_can_not_be(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        ServerConfig(**options)


def test_an_event_stays_on_one_line_for_clients_that_split_at_more_than_newlines():
    text = "a\x85b\u2028c\u2029d\x1ce\nf"
    event = OPENAI_EVENTS.encode({"text": text}).decode()
    assert len(event.strip().splitlines()) == 1
    assert orjson.loads(event.removeprefix("data: ")) == {"text": text}


def test_metrics_name_the_model():
    with TestClient(create_app(AsyncEngine(), ServedModels(("tiny",)))) as client:
        samples = [line for line in client.get("/metrics").text.splitlines() if not line.startswith("#")]
    ours = [line for line in samples if line.startswith(("vllm:", "freehold_"))]
    assert len(ours) > 20
    assert all('model_name="tiny"' in line for line in ours)


@pytest.fixture
def collector():
    """An OpenTelemetry collector -> (its URL, the spans that it got)."""
    spans = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            sent = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
            spans.extend(span for one in sent.resource_spans for scope in one.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
        server.shutdown()


def test_each_request_is_a_span_of_the_callers_trace(collector):
    url, spans = collector
    record = Record("name", "billing", "/v1/completions", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    record.status, record.prompt_tokens, record.ends = 200, 7, ["length"]
    traces = Traces(url)
    traces.write(record)
    traces.write(Record("cut off", "", "/generate"))
    traces.close()
    one, other = spans
    values = {entry.key: entry.value for entry in one.attributes}
    assert (one.name, one.trace_id.hex(), one.parent_span_id.hex()) == (
        "/v1/completions", "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    )  # fmt: skip
    assert values["gen_ai.usage.input_tokens"].int_value == 7
    assert values["gen_ai.response.finish_reasons"].array_value.values[0].string_value == "length"
    assert 0 <= one.end_time_unix_nano - one.start_time_unix_nano < 60e9
    assert (one.status.code, other.status.code) == (0, 2)


def test_chat_in_python(checkpoint):
    params = SamplingParams(temperature=0, max_tokens=4)
    with LLM(checkpoint=checkpoint, num_pages=50) as llm:
        (one,) = llm.chat(ASK["messages"], params)
        (of_several, _) = llm.chat([ASK["messages"], [{"role": "user", "content": "Bye."}]], params)
        (generated,) = llm.generate(llm.render(ASK["messages"]), params)
        assert one.text == of_several.text == generated.text
        llm.tokenizer.chat_template = None
        with pytest.raises(ChatTemplateError, match="no chat template"):
            llm.chat(ASK["messages"], params)
