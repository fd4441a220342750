"""What an operator has set, and that an engine process which is started again has it before it serves."""

import asyncio
import gc
import os
import shutil
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
import torch
from processes import engine_of, restart_engine
from tiny_models import SIZES, save_random
from transformers import LlamaConfig

from freehold.config import EngineConfig
from freehold.contract.errors import BadRequest, EngineUnavailable
from freehold.engine.placed_model import PlacedModel
from freehold.ipc import protocol as msg
from freehold.ipc.async_engine import AsyncEngine
from freehold.ipc.engine_process import assembled
from freehold.ipc.engine_setup import EngineSetup
from freehold.memory import PrefetchPolicy
from freehold.runtime.storage_backend import Backend
from freehold.server.child import running_server

BACKEND = "/hicache/storage-backend"
PROMPT = list(range(2, 40))


def test_a_setup_follows_what_was_done():
    config = EngineConfig(model="m", enable_hierarchical_cache=True, hicache_storage_capacity=7)
    setup = EngineSetup(config)
    status = {
        "hicache_storage_backend": "file", "hicache_storage_location": "/kv", "hicache_storage_capacity": 9,
        "hicache_storage_prefetch_policy": "best_effort", "state": "attached", "error": None, "trouble": None,
    }  # fmt: skip
    done = [
        ("update_weights", "/w", None), ("pause", "retract", None), ("load_adapter", {"name": "a", "path": "/a"}, None),
        ("load_adapter", {"name": "b", "path": "/b"}, None), ("unload_adapter", "a", None), ("storage", None, status),
        ("flush", None, 3),
    ]  # fmt: skip
    for procedure, argument, value in done:
        setup = setup.after(procedure, argument, value)
    assert EngineSetup.decode(setup.encode()).encode() == setup.encode()
    assert (setup.weights, setup.paused, setup.config.adapter_paths) == ("/w", "retract", {"b": "/b"})
    options = setup.config
    found = (options.hicache_storage_backend, options.hicache_storage_location, options.hicache_storage_capacity)
    assert (*found, options.hicache_storage_prefetch_policy) == ("file", "/kv", 9, "best_effort")
    assert setup.after("storage", None, {**status, "state": "detaching", "hicache_storage_backend": None}) == setup
    gone = dict.fromkeys(status, None) | {"state": "detached"}
    assert setup.after("storage", None, gone | {"error": "no folder"}) == setup, "the next process tries again"
    assert setup.after("storage", None, gone).config.hicache_storage_backend is None
    assert setup.after("resume", None, None).paused is None


class Replying:
    """An engine process that answers when the test says so."""

    silence = 0.0

    def __init__(self):
        self.calls = asyncio.Queue()
        self.told = []

    def send_soon(self, command):
        self.told.append(command)

    async def send(self, command):
        await self.calls.put(command)


def test_what_was_done_is_known_even_if_the_caller_has_left():
    async def run():
        engine, child = AsyncEngine(), Replying()
        engine.ready, engine._child = msg.Ready("m", "llama", 10, 10, 10), child
        failing, leaving = (asyncio.create_task(engine.call("update_weights", folder)) for folder in ("/bad", "/good"))
        bad, good = await child.calls.get(), await child.calls.get()
        leaving.cancel()
        await asyncio.wait({leaving})
        engine._take_reply(msg.Reply(good.number))
        engine._take_reply(msg.Reply(bad.number, failure=msg.Failure("BadRequest", "no", None, 400)))
        with pytest.raises(BadRequest):
            await failing
        assert engine.setup.weights == "/good"
        assert not engine._calls

    asyncio.run(run())


def test_an_engine_that_ends_leaves_no_error_behind_for_a_caller_that_has_left():
    """Python would write it to the log."""

    async def run():
        engine, child, unheard = AsyncEngine(), Replying(), []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
        engine.ready, engine._child = msg.Ready("m", "llama", 10, 10, 10), child
        staying, leaving = (asyncio.create_task(engine.call("memory")) for _ in range(2))
        for _ in range(2):
            await child.calls.get()
        leaving.cancel()
        await asyncio.wait({leaving})
        del leaving
        engine.abandon("it has ended")
        with pytest.raises(EngineUnavailable):
            await staying
        gc.collect()
        assert not unheard

    asyncio.run(run())


def test_saving_ends_with_its_caller_and_an_update_does_not():
    async def run():
        engine, child = AsyncEngine(), Replying()
        engine.ready, engine._child = msg.Ready("m", "llama", 10, 10, 10), child
        numbers = []
        for procedure in ("update_weights", "save"):
            leaving = asyncio.create_task(engine.call(procedure))
            numbers.append((await child.calls.get()).number)
            leaving.cancel()
            await asyncio.wait({leaving})
        assert child.told == [msg.Cancel(numbers[1])]
        assert list(engine._calls) == numbers[:1]

    asyncio.run(run())


# -- with a model -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two models of one shape."""
    found = [tmp_path_factory.mktemp("weights") for _ in range(2)]
    for seed, folder in enumerate(found):
        save_random(LlamaConfig(**SIZES, tie_word_embeddings=True), seed + 3, torch.float32, folder)
    return [str(folder) for folder in found]


def test_only_the_weights_that_were_set_are_loaded(folders, tmp_path, monkeypatch):
    loaded = []
    load = PlacedModel.load
    monkeypatch.setattr(
        PlacedModel, "load", lambda model, checkpoint: loaded.append(str(checkpoint.path)) or load(model, checkpoint)
    )
    config = EngineConfig(model=folders[0], num_pages=60, enable_hierarchical_cache=True)
    setups = (EngineSetup(config), EngineSetup(config, weights=folders[1]))
    updated, again = (assembled(setup)[0] for setup in setups)
    assert loaded == folders
    updated.scheduler.update_weights(folders[1])
    try:
        seeds = [one.scheduler.memory.tiers.seed(one.scheduler.memory.tree.namespace("")) for one in (updated, again)]
        assert seeds[0] == seeds[1], "what the tiers have is found by the same keys"
        assert again.path == Path(folders[0])
    finally:
        updated.shutdown()
        again.shutdown()
    save_random(LlamaConfig(**{**SIZES, "num_hidden_layers": 1}), 3, torch.float32, tmp_path)
    with pytest.raises(ValueError, match="another kind of model: 1 layers, expected 4"):
        assembled(EngineSetup(config, weights=str(tmp_path)))


@pytest.mark.timeout(100)
def test_the_cause_of_a_start_that_failed_is_kept(folders, tmp_path):
    """The weights that the operator has set are gone when the process is started again."""
    shutil.copytree(folders[1], gone := tmp_path / "gone")

    async def run():
        engine = AsyncEngine(folders[0], max_restarts=1, num_pages=60)
        await engine.start()
        try:
            await engine.call("update_weights", str(gone))
            shutil.rmtree(gone)
            engine._child.kill()
            while engine.failure is None:
                await asyncio.sleep(0.05)
            assert str(gone) in engine.failure
        finally:
            await engine.shutdown()

    asyncio.run(run())


@pytest.mark.timeout(100)
@pytest.mark.parametrize("has_served", [False, True])
def test_a_system_that_starts_no_process_is_a_failure_that_is_told(folders, monkeypatch, has_served):
    """Not a server that says for ever that it is loading."""

    async def run():
        engine = AsyncEngine(folders[0], max_restarts=1, num_pages=60)
        if has_served:
            await engine.start()
        monkeypatch.setattr(sys, "executable", "/gone/python")
        try:
            if has_served:
                engine._child.kill()
                await engine._tasks[0]
            else:
                await engine.start()
        except EngineUnavailable:
            assert "can't be started: [Errno 2]" in (engine.failure or "")
        else:
            pytest.fail("it has been started")
        finally:
            await engine.shutdown()

    asyncio.run(run())


# -- over HTTP --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url(folders):
    options = ("--num-pages", "60", "--enable-hierarchical-cache", "--allow-any-model", "--max-restarts", "5")
    with running_server("--model", folders[0], *options) as url:
        yield url


def said(url):
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def until(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def post(url, path, **body):
    return httpx.post(f"{url}{path}", json=body, timeout=60)


@pytest.mark.timeout(200)
def test_an_engine_that_is_started_again_is_as_the_operator_left_it(url, folders, tmp_path):
    first = said(url)
    assert post(url, "/update_weights_from_disk", model_path=folders[1]).status_code == 200
    second = said(url)
    assert second != first
    place = {"hicache_storage_backend": "file", "hicache_storage_location": str(tmp_path)}
    assert httpx.put(f"{url}{BACKEND}", json=place, timeout=60).status_code == 200
    assert post(url, "/pause_generation", mode="retract").status_code == 200
    restart_engine(url)
    assert httpx.get(f"{url}{BACKEND}").json()["hicache_storage_location"] == str(tmp_path)
    assert httpx.get(f"{url}/get_model_info").json()["model_path"] == folders[1]
    answers = []
    waiting = threading.Thread(target=lambda: answers.append(said(url)))
    waiting.start()
    while "continued" not in httpx.get(f"{url}/debug/memory").json()["waits_for"]:
        time.sleep(0.05)
    assert not answers
    post(url, "/continue_generation")
    waiting.join(60)
    assert answers == [second]
    assert httpx.delete(f"{url}{BACKEND}", timeout=60).status_code == 200
    assert post(url, "/update_weights_from_disk", model_path=folders[0]).status_code == 200
    assert said(url) == first


@pytest.mark.timeout(200)
def test_an_engine_that_is_started_again_serves_without_a_storage_that_is_gone(url, tmp_path):
    folder, expected = tmp_path / "kv", said(url)
    place = {"hicache_storage_backend": "file", "hicache_storage_location": str(folder)}
    assert httpx.put(f"{url}{BACKEND}", json=place, timeout=60).status_code == 200
    folder.rename(tmp_path / "elsewhere")
    folder.write_text("not a folder")

    def trouble():
        """After something new has been asked for in storage."""
        post(url, "/v1/completions", prompt=f"{time.time()} {PROMPT}", max_tokens=1)
        return httpx.get(f"{url}{BACKEND}").json()["trouble"], httpx.get(f"{url}/health").json()["degraded"]

    for _ in range(2):
        restart_engine(url)
        assert said(url) == expected
        status = httpx.get(f"{url}{BACKEND}").json()
        assert (status["state"], status["error"]) == ("attached", None)
        assert str(folder) in status["trouble"], "why it is not used"
    until(lambda: "freehold_storage_unavailable{model_name" in httpx.get(f"{url}/metrics").text)
    until(lambda: str(folder) in trouble()[1].get("storage", ""))
    folder.unlink()
    (tmp_path / "elsewhere").rename(folder)
    until(lambda: trouble() == (None, {}))
    assert said(url) == expected
    assert httpx.delete(f"{url}{BACKEND}", timeout=60).json()["state"] == "detached"


@pytest.mark.timeout(200)
def test_a_storage_that_is_gone_can_be_attached_again_or_given_up(folders, tmp_path):
    folder, other = tmp_path / "kv", tmp_path / "other"
    place = {"hicache_storage_backend": "file", "hicache_storage_location": str(folder)}
    config = EngineConfig(model=folders[0], num_pages=60, enable_hierarchical_cache=True, **place)
    folder.write_text("not a folder")
    for has_served in (False, True):
        assembly, storage = assembled(EngineSetup(config, has_served=has_served))
        assert str(folder) in (storage.status()["trouble"] or "")
        if not has_served:
            assembly.shutdown()
    try:
        storage.detach()
        until(lambda: storage.status()["state"] == "detached")
        storage.attach_again(Backend("file", str(other), 1 << 24, PrefetchPolicy.TIMEOUT))
        assert (storage.status()["state"], storage.status()["error"]) == ("attached", None)
    finally:
        assembly.shutdown()


@pytest.mark.timeout(200)
def test_a_folder_that_was_copied_by_half_changes_nothing(url, folders, tmp_path):
    before, engine = said(url), engine_of(url)
    half = shutil.copytree(folders[1], tmp_path / "half")
    (file,) = half.glob("*.safetensors")
    os.truncate(file, file.stat().st_size // 2)
    refused = post(url, "/update_weights_from_disk", model_path=str(half))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model_path"), refused.text
    assert said(url) == before
    assert engine_of(url) == engine


def test_a_model_of_no_name_or_of_another_kind_is_refused(url, tmp_path):
    """`model_path` of nothing would be the server's folder."""
    save_random(LlamaConfig(**{**SIZES, "num_hidden_layers": 1}), 3, torch.float32, tmp_path)
    empty, other = (post(url, "/update_weights_from_disk", model_path=path) for path in ("", str(tmp_path)))
    assert (empty.status_code, empty.json()["error"]["param"]) == (400, "model_path")
    message = other.json()["error"]["message"]
    assert (other.status_code, message.count(str(tmp_path))) == (400, 1), message
    assert "1 layers, expected 4" in message


def test_a_store_that_can_not_be_is_refused_where_it_is_attached(url):
    engine = engine_of(url)
    for backend, location in (("s3", "s3://my bucket/kv"), ("redis", "redis://host:port/0")):
        place = {"hicache_storage_backend": backend, "hicache_storage_location": location}
        refused = httpx.put(f"{url}{BACKEND}", json=place, timeout=60)
        assert refused.status_code == 400
        assert location in refused.json()["error"]["message"]
    assert httpx.get(f"{url}{BACKEND}").json()["state"] == "detached"
    assert engine_of(url) == engine
