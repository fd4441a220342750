"""The files for operators name only options and metrics that exist."""

import configparser
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from starlette.testclient import TestClient

from freehold.config import EngineConfig
from freehold.ipc.async_engine import AsyncEngine
from freehold.options import options_of
from freehold.server.app import create_app
from freehold.server.config import ServerConfig
from freehold.server.served_models import ServedModels

EXAMPLES = Path(__file__).parent.parent / "examples"
OPTIONS = {one.name: one for record in (EngineConfig, ServerConfig) for one in options_of(record)}


def check_flags(words: list[str]) -> None:
    flags = [word for word in words if word.startswith("--")]
    assert flags
    for flag in flags:
        assert flag.removeprefix("--").replace("-", "_") in OPTIONS, flag


def test_the_dashboard_asks_for_metrics_that_the_server_has():
    with TestClient(create_app(AsyncEngine(), ServedModels(("m",)))) as client:
        text = client.get("/metrics").text
    families = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    names = {name + suffix for name in families for suffix in ("", "_bucket", "_sum", "_count")}
    board = json.loads((EXAMPLES / "grafana.json").read_text())
    asked = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"(?:vllm:|freehold_)\w+", target["expr"])
    }
    asked |= set(re.findall(r"freehold_\w+", board["templating"]["list"][0]["query"]))
    assert len(asked) > 15
    assert asked <= names, asked - names
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_the_unit_gives_options_that_exist_and_time_to_drain():
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read(EXAMPLES / "freehold.service")
    service = unit["Service"]
    words = shlex.split(service["ExecStart"])
    assert words[1] == "serve"
    check_flags(words)
    drain = float(words[words.index("--drain-timeout") + 1])
    assert float(service["TimeoutStopSec"]) > drain
    assert service["Restart"] == "on-failure"


def test_the_image_and_the_composition_give_options_that_exist():
    lines = (EXAMPLES / "Dockerfile").read_text().splitlines()
    entry = json.loads(next(line for line in lines if line.startswith("ENTRYPOINT")).removeprefix("ENTRYPOINT "))
    assert entry[:2] == ["freehold", "serve"]
    check_flags(entry)
    for line in lines:
        if line.startswith("COPY"):
            for source in line.split()[1:-1]:
                assert (EXAMPLES.parent / source).exists(), source
    compose = yaml.safe_load((EXAMPLES / "compose.yaml").read_text())
    variables = {name for name in compose["services"]["freehold"]["environment"] if name.startswith("FREEHOLD_")}
    assert variables <= {one.variable for one in OPTIONS.values()}
    scraped = yaml.safe_load(compose["services"]["prometheus"]["environment"]["PROMETHEUS_CONFIG"])
    assert scraped["scrape_configs"][0]["static_configs"][0]["targets"] == ["freehold:8000"]


@pytest.mark.parametrize("file", ["freehold.service", "Dockerfile", "compose.yaml", "grafana.json"])
def test_each_file_is_explained(file):
    assert f"`{file}`" in (EXAMPLES / "README.md").read_text()
