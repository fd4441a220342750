"""Health, metrics, memory, clients that leave, draining."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from urllib.parse import quote

import httpx
import psutil
import pytest

from commands import run
from freehold.server.child import free_port, running_server
from freehold.server.launch import served_name


def memory(url: str) -> dict:
    return httpx.get(f"{url}/debug/memory", timeout=30).json()


def wait_until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def test_information(server):
    assert httpx.get(f"{server}/health").status_code == 200
    assert re.fullmatch(r"\d+\.\d+\.\d+", httpx.get(f"{server}/version").json()["version"])
    info = httpx.get(f"{server}/server_info").json()
    assert (info["page_size"], info["disable_radix_cache"], info["max_total_num_tokens"]) == (16, False, 6400)
    assert httpx.get(f"{server}/model_info").json()["model_path"].endswith(".gguf")


def test_tokenize_and_back(server):
    tokens = httpx.post(f"{server}/tokenize", json={"prompt": "Hello, world"}).json()
    assert tokens["count"] == len(tokens["tokens"]) == 3
    text = httpx.post(f"{server}/detokenize", json={"tokens": tokens["tokens"]}).json()
    assert text == {"prompt": "Hello, world"}
    chat = httpx.post(f"{server}/tokenize", json={"messages": [{"role": "user", "content": "Hi"}]}).json()
    assert chat["count"] > 10
    for body, param in (({}, "prompt"), ({"tokens": [10**8]}, "tokens")):
        route = "detokenize" if "tokens" in body else "tokenize"
        answer = httpx.post(f"{server}/{route}", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_metrics_have_the_names_that_dashboards_read(server):
    httpx.post(f"{server}/v1/completions", json={"prompt": "Hello", "max_tokens": 4}, timeout=60)
    text = httpx.get(f"{server}/metrics").text
    for name in (
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
        "vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_bucket", "vllm:e2e_request_latency_seconds_bucket",
        "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total", "vllm:num_preemptions_total",
        'vllm:request_success_total{finished_reason="length",model_name="SmolLM2-135M-Instruct"}',
        'freehold_pages{group="full",model_name="SmolLM2-135M-Instruct",owner="free"}',
        'freehold_pages{group="full",model_name="SmolLM2-135M-Instruct",owner="tree"}',
    ):  # fmt: skip
        assert name in text, name


def test_who_holds_what(server):
    for pin in httpx.get(f"{server}/v1/cache/pins").json()["data"]:  # the schema fuzzer may have left some
        httpx.delete(f"{server}/v1/cache/pins/{quote(pin['id'], safe='')}")
    httpx.post(f"{server}/v1/completions", json={"prompt": [7] * 100, "max_tokens": 4}, timeout=60)
    report = memory(server)
    pages = report["pages"]
    assert pages["capacity"] == 400 == sum(count for owner, count in pages.items() if owner != "capacity")
    assert pages["tree"] >= 6
    explained = httpx.get(f"{server}/debug/memory", params={"page": 1}).json()["explanation"]
    assert explained.startswith("page 1:")
    assert httpx.get(f"{server}/debug/memory", params={"page": 9999}).status_code == 400
    assert httpx.post(f"{server}/flush_cache").headers["x-flushed-pages"] == str(pages["tree"] + pages["tail"])
    assert memory(server)["pages"]["free"] == 400


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_aborted(server, stream):
    async def leave():
        body = {"prompt": "Once", "max_tokens": 3000, "ignore_eos": True, "stream": stream}
        async with httpx.AsyncClient(base_url=server, timeout=60) as client:
            if not stream:
                with pytest.raises(httpx.TimeoutException):
                    await client.post("/v1/completions", json=body, timeout=1.0)
                return
            async with client.stream("POST", "/v1/completions", json=body) as response:
                async for _ in response.aiter_lines():
                    assert len(memory(server)["leases"]) == 1
                    return

    asyncio.run(leave())
    wait_until(lambda: not memory(server)["leases"], seconds=3)
    assert memory(server)["pages"]["lease"] == 0


def test_inspect_command(server):
    def inspect(*flags):
        return run("inspect", "--url", server, *flags)

    assert "400" in inspect()[1]
    assert "page 3:" in inspect("--page", "3")[1]
    code, said = inspect("--page", "100000")
    assert (code, "page must be 0 .. 400" in said) == (1, True), said


def test_sigterm_drains_and_leaves_no_process():
    with running_server("--num-pages", "200") as url:
        server = next(p for p in psutil.Process().children() if str(url.rsplit(":", 1)[1]) in p.cmdline())
        family = [server, *server.children(recursive=True)]
        assert len(family) == 2

        async def finish_while_draining():
            async with httpx.AsyncClient(base_url=url, timeout=60) as client:
                body = {"prompt": "Once", "max_tokens": 60, "ignore_eos": True, "stream": True}
                async with client.stream("POST", "/v1/completions", json=body) as response:
                    lines = []
                    async for line in response.aiter_lines():
                        if not lines:
                            os.kill(server.pid, signal.SIGTERM)
                        lines.append(line)
                    return [line for line in lines if line]

        lines = asyncio.run(finish_while_draining())
        assert lines[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in lines[-2]
        assert all(not process.is_running() for process in psutil.wait_procs(family, timeout=20)[1])


@pytest.mark.parametrize("when", ["while loading", "when ready"])
def test_the_engine_ends_with_its_server_even_if_that_is_killed(when):
    port = free_port()
    command = [sys.executable, "-m", "freehold", "serve", "--port", str(port), "--num-pages", "50"]
    server = psutil.Popen(command, stderr=subprocess.DEVNULL)
    wait_until(lambda: server.children(), seconds=60)
    family = server.children(recursive=True)
    if when == "when ready":
        wait_until(lambda: _health(port) == 200, seconds=120)
    server.kill()
    server.wait()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive


def _health(port: int) -> int:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code
    except httpx.HTTPError:
        return 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--schedule-policy", "random"), "schedule_policy must be one of"),
        (("--model", "./nowhere"), "there is no file or directory"),
        (("--page-size", "5"), "page_size must be one of"),
    ],
)
def test_options_that_cannot_be_are_refused_at_start(flags, words):
    code, said = run("serve", "--port", free_port(), *flags)
    assert (code, words in said) == (1, True), said


def test_served_names():
    from pathlib import Path

    assert served_name(Path("/x/SmolLM2-135M-Instruct.Q4_1.gguf")) == "SmolLM2-135M-Instruct"
    assert served_name(Path("/x/model.v2.gguf")) == "model.v2"
