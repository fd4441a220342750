"""README and docs/serving.md: their commands run as they stand, and what they name exists."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import typer.main
from openai import OpenAI

from freehold.cli import app
from freehold.cli.foreign_flags import GRANTED, HINTS, LIMITED, RENAMED, VALUES, WITHOUT_EFFECT
from freehold.config import EngineConfig
from freehold.options import options_of
from freehold.server.access.rights import RIGHTS
from freehold.server.child import running_server
from freehold.server.config import ServerConfig

ROOT = Path(__file__).parent.parent.parent
README, SERVING, ACCESS = (
    (ROOT / name).read_text() for name in ("README.md", "docs/serving.md", "docs/access.md")
)  # fmt: skip
DOCUMENTS = {path.relative_to(ROOT): path.read_text() for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")]}
# FastAPI's own pages, and other names of routes that are documented.
UNDOCUMENTED = ("/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json", "/get_model_info", "/get_server_info")
COMMANDS = typer.main.get_command(app)
OF_OTHERS = {*GRANTED, *HINTS, *LIMITED, *RENAMED, *VALUES, *WITHOUT_EFFECT, "--swap-space"}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def console(block: str) -> list[tuple[str, list[str]]]:
    """(command, what it prints) of a block whose commands begin with $; a quote may go over several lines."""
    found: list[tuple[str, list[str]]] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif found and found[-1][0].count("'") % 2:
            found[-1] = (f"{found[-1][0]}\n{line}", [])
        elif found and line:
            found[-1][1].append(line)
    return found


# Without max_tokens, and sampled: what invites a long answer may get one of thousands of tokens.
SHORT = "What is the capital of France? Answer in one sentence."


@pytest.fixture(scope="module")
def fresh():
    """A server as the README starts it, but for the port -> its URL."""
    with running_server() as url:
        yield url


@pytest.mark.skipif(not (shutil.which("curl") and shutil.which("jq")), reason="the README's commands need curl and jq")
def test_the_session_of_the_readme_runs_as_it_stands(fresh):
    (serve, said), *commands = console(blocks(README, "")[0])
    assert serve == "freehold serve &"
    assert said[0].startswith("Freehold serves SmolLM2-135M-Instruct on http://127.0.0.1:8000")
    assert len(commands) == 3
    port = fresh.rpartition(":")[2]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for command, printed in commands:
        run = f"{command} --url {fresh}" if command.startswith("freehold inspect") else command
        run = run.replace("localhost:8000", f"localhost:{port}")
        done = subprocess.run(["bash", "-c", run], env={**os.environ, "PATH": path}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        got = [line for line in done.stdout.splitlines() if line]
        if "inspect" in command:
            # Which step moved a page depends on how the loop ran.
            got, printed = ([re.sub(r"\d+", "N", line) for line in lines] for lines in (got, printed))
        assert got == printed


def test_the_python_of_the_readme_runs_as_it_stands(fresh, capsys):
    (code,) = blocks(README, "python")
    exec(code.replace("http://127.0.0.1:8000", fresh), {})
    assert len(capsys.readouterr().out) > 20


def test_the_python_of_the_documentation_runs_as_it_stands(fresh, capsys):
    session, llm = blocks(SERVING, "python")
    client = OpenAI(base_url=f"{fresh}/v1", api_key="unused")
    names = {"httpx": httpx, "url": fresh, "client": client, "model": "SmolLM2-135M-Instruct",
             "new_message": {"role": "user", "content": SHORT}}  # fmt: skip
    exec(session, names)
    assert httpx.get(f"{fresh}/v1/sessions/{names['session']}").json()["turns"] == 1
    exec(llm, {})
    assert len(capsys.readouterr().out.splitlines()) >= 2


# -- what is named exists ---------------------------------------------------------------------------------


def all_flags() -> set[str]:
    flags = set()
    for record in (EngineConfig, ServerConfig):
        for one in options_of(record):
            flags |= {f"--{one.name.replace('_', '-')}", *one.flags}
    waiting = [COMMANDS]
    while waiting:
        command = waiting.pop()
        flags |= {name for one in command.params for name in one.opts}
        waiting += getattr(command, "commands", {}).values()
    return flags


@pytest.mark.parametrize("name", DOCUMENTS, ids=str)
def test_every_flag_that_is_named_exists(name):
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", DOCUMENTS[name]))
    assert named <= all_flags() | OF_OTHERS | {"--help"}, named - all_flags()


@pytest.mark.parametrize("name", DOCUMENTS, ids=str)
def test_every_file_that_is_named_exists(name):
    files = {str(path) for part in ("src", "tests", "examples", "conformance") for path in (ROOT / part).rglob("*.py")}
    for file in re.findall(r"`([\w/]+\.py)\b", DOCUMENTS[name]):
        assert any(path.endswith(f"/{file}") for path in files), file


@pytest.mark.parametrize("name", DOCUMENTS, ids=str)
def test_every_command_that_is_named_exists(name):
    for words in re.findall(r"`freehold ([a-z][a-z -]*)", DOCUMENTS[name]):
        command = COMMANDS
        for word in words.split():
            commands = getattr(command, "commands", {})
            if word.startswith("-") or not commands:
                break
            assert word in commands, f"freehold {words}"
            command = commands[word]
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z]+)", DOCUMENTS[name])) <= targets


@pytest.mark.parametrize("name", DOCUMENTS, ids=str)
def test_every_link_leads_somewhere(name):
    for target in re.findall(r"\]\(([^)#]+)(?:#[\w-]+)?\)", DOCUMENTS[name]):
        assert target.startswith("http") or (ROOT / name).parent.joinpath(target).exists(), target


def test_every_route_is_documented():
    """In the tables of serving.md, where several may share a row and [/x] is a part that may be left out."""
    rows = re.findall(r"^\| (`(?:POST|GET|DELETE).*?) \|", SERVING, re.MULTILINE)
    assert len(rows) > 15
    named = " ".join(rows)
    for route in RIGHTS:
        stem = re.sub(r"/\{.*", "", route)
        if stem not in (
            "/docs",
            "/docs/oauth2-redirect",
            "/redoc",
            "/openapi.json",
            "/get_model_info",
            "/get_server_info",
        ):
            assert stem in named, route
    known = {re.sub(r"{\w+(:path)?}", "{}", route) for route in RIGHTS}
    for document in DOCUMENTS.values():
        for route in re.findall(r"(?:GET|POST|PUT|DELETE) (/[\w/{}-]+)", document):
            assert re.sub(r"{\w+}", "{}", route) in known, route
    for stem in re.findall(r"/[a-z_0-9/-]+", named):
        assert any(route.startswith(stem.rstrip("/")) for route in RIGHTS) or stem.startswith(
            ("/fork", "/rewind", "/save", "/restore", "/cancel", "/input_items")
        ), stem


def test_fields_of_the_key_file_are_documented():
    from freehold.server.access.keys import FIELDS

    (example,) = blocks(ACCESS, "toml")
    assert {line.split(" =")[0] for line in example.splitlines() if " =" in line} == set(FIELDS)


def test_defaults_that_are_named_are_the_defaults():
    http = ServerConfig()
    said = {
        f"`--header-timeout` {http.header_timeout:g} s": ACCESS,
        f"`--body-timeout` {http.body_timeout:g} s": ACCESS,
        f"`--max-connections` {http.max_connections:,}": ACCESS,
        f"`--max-connections-per-client` {http.max_connections_per_client:,}": ACCESS,
        f"`--max-outputs-per-request` {http.max_outputs_per_request}": ACCESS,
        f"http://{http.host}:{http.port}": SERVING,
    }
    for words, document in said.items():
        assert words in document, words
