"""Whatever a user can get wrong ends with a line that says what, and with a code, but not with a traceback."""

import os
import socket
import subprocess
import sys

import pytest

from commands import run
from freehold.cli.command_line import address, size
from freehold.models.loading.resolve import resolve_model


def run_alone(*arguments: str, given: str = "") -> tuple[int, str]:
    """In a process of its own."""
    command = [sys.executable, "-m", "freehold", *arguments]
    environment = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(
        command, input=given, env=environment, capture_output=True, text=True, check=False, timeout=90
    )
    return done.returncode, done.stderr + done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models that are none."""
    place = tmp_path_factory.mktemp("models")
    (place / "empty.gguf").write_bytes(b"")
    (place / "foreign.gguf").write_bytes(b"hello")
    with open(resolve_model(None), "rb") as model:
        (place / "short.gguf").write_bytes(model.read(1_000_000))
    (place / "directory").mkdir()
    return place


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("check --model {folder}/empty.gguf", "is empty"),
        ("serve --model {folder}/short.gguf", "is damaged"),
        ("serve --model {folder}/directory", "has no config.json"),
        ("check --model {folder}/foreign.gguf", "is not a GGUF file"),
        ("generate hello --model {folder}/directory", "has no config.json"),
        ("chat --model {folder}/empty.gguf", "is empty"),
        ("serve --port 99999", "port must be between 0 and 65535"),
        ("serve --page-size 0", "page_size must be at least 1"),
        ("serve --log-level loud", "log_level must be one of"),
        ("serve --api-key ''", "a key must not be empty"),
        ("serve --session-store /nowhere/sessions.db", "can't be opened"),
        ("serve --session-store {folder}/directory", "can't be opened"),
        ("serve --host 1.2.3.4", "can't listen on 1.2.3.4:8000"),
        ("check --kv-cache-memory-bytes eight", "is no size"),
        ("inspect localhost:9", "http://localhost:9 does not answer"),
        ("simulate --matrix --minutes 0", "minutes must be a positive number"),
        ("simulate --matrix --minutes=-1", "minutes must be a positive number"),
        ("check --session-store /nowhere/sessions.db", "session_store: /nowhere/sessions.db can't be opened"),
        ("check --api-key-file /nowhere/keys.toml", "api_key_file: /nowhere/keys.toml can't be read"),
        ("check --model {folder}/short.gguf", "is damaged"),
        ("check {tiers} --hicache-storage-backend s3 --hicache-storage-location bucket", "expected s3://bucket/prefix"),
        ("check {tiers} --hicache-storage-backend file --hicache-storage-capacity 10", "must be at least"),
        ("bench serve --url localhost:9", "does not answer"),
        ("generate ''", "must have at least one token"),
        ("serve --gpu-memory-utilization 0.9", "use --kv-cache-memory-bytes"),
        ("serve --tensor-parallel-size 2", "a model is computed by one process"),
        ("simulate --trace {folder}/foreign.gguf", "foreign.gguf"),
    ],
)
def test_what_a_user_gets_wrong_ends_with_a_line(folder, arguments, words):
    code, said = run(
        *(part.strip("'") for part in arguments.format(folder=folder, tiers="--enable-hierarchical-cache").split())
    )
    assert code != 0
    assert words in said, said
    assert "Traceback" not in said, said
    assert "─ Traceback" not in said


@pytest.mark.parametrize("command", ["serve", "generate hello"])
def test_a_process_ends_without_a_traceback(folder, command):
    code, said = run_alone(*command.split(), "--model", f"{folder}/foreign.gguf")
    assert (code, "is not a GGUF file" in said, "Traceback" in said) == (1, True, False), said


def test_a_port_in_use_is_said_before_a_model_is_loaded():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, said = run("serve", "--port", str(taken.getsockname()[1]))
    assert (code, "already in use" in said, "Traceback" in said) == (1, True, False), said


def test_a_blank_line_is_no_prompt_and_loses_none():
    code, said = run("generate", "-", "--max-tokens", "2", given="One\n\nTwo\n")
    assert code == 0, said
    assert "One" in said
    assert "Two" in said


@pytest.mark.parametrize(
    ("given", "bytes_"),
    [("512", 512), ("4k", 4000), ("8GB", 8 * 10**9), ("1.5GiB", 3 << 29), ("2 MiB", 2 << 20), (7, 7)],
)
def test_sizes(given, bytes_):
    assert size(given) == bytes_


def test_help_shows_brackets_as_they_are():
    assert "[[keys]]" in run("serve", "--help")[1]


def test_addresses():
    assert address("localhost:8000") == "http://localhost:8000"
    assert address("https://host/x") == "https://host/x"
