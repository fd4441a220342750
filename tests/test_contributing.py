"""CONTRIBUTING.md, followed literally in a copy of the source."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def scratch(tmp_path_factory) -> Path:
    """A copy of the source, with everything added that the page adds."""
    folder = tmp_path_factory.mktemp("scratch")
    shutil.copytree(ROOT / "src", folder / "src")
    blocks = re.findall(r"```python\n# (in )?(src/\S+)\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    assert len(blocks) == 3
    for is_there, name, code in blocks:
        path = folder / name
        assert path.exists() == bool(is_there)
        path.write_text(f"{path.read_text()}\n\n{code}" if is_there else code)
    app = folder / "src/freehold/server/app.py"
    routes = "    app.include_router(dummy_routes(engine))\n    for kind in EXPECTED_ERRORS:"
    text = app.read_text().replace("    for kind in EXPECTED_ERRORS:", routes)
    app.write_text(text.replace("CLOSING_", "from freehold.server.operator.dummy import dummy_routes\n\nCLOSING_", 1))
    config = folder / "src/freehold/config.py"
    config.write_text(config.read_text().replace('"fifo", "priority")', '"fifo", "priority", "shortest")'))
    return folder


def run(scratch: Path, program: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(scratch / "src")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_route(scratch):
    program = (
        "from fastapi.testclient import TestClient\n"
        "from freehold.ipc.async_engine import AsyncEngine\n"
        "from freehold.server.app import create_app\n"
        "from freehold.server.served_models import ServedModels\n"
        "print(TestClient(create_app(AsyncEngine(), ServedModels(('m',)))).get('/dummy').json())\n"
    )
    assert run(scratch, program).strip() == "{'running': 0}"


def test_an_eviction_policy(scratch):
    program = (
        "from freehold.simulation.scenario import Cell, Scenario\n"
        "from freehold.simulation.world import World\n"
        "from dataclasses import replace\n"
        "scenario = Scenario.generate(Cell.parse('overlap:4:plain:fcfs:tight'), 1)\n"
        "World(replace(scenario, eviction='shortest')).run()\n"
        "print('ran')\n"
    )
    assert run(scratch, program).strip() == "ran"


def test_a_model(scratch, tmp_path):
    import torch

    from models.tiny_models import TINY_MODELS, save_random

    save_random(TINY_MODELS["llama"].make_config(), 3, torch.float32, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "dummy"}))
    program = (
        "from freehold import LLM, SamplingParams\n"
        f"with LLM({str(tmp_path)!r}, num_pages=16) as llm:\n"
        "    print(len(llm.generate([5, 6, 7], SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids))\n"
    )
    assert run(scratch, program).strip() == "4"
