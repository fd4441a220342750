"""SGLang's own HTTP tests of constrained output and tool calls, as its wheel has them, against the bundled model.

Only modules that a test file imports for starting servers of its own are replaced: the server is ours.
"""

import importlib.util
import os
import sys
import types
import unittest
import zipfile
from pathlib import Path

import openai
import pytest

from freehold.server.child import running_server

WHEELS = Path(os.environ.get("CONFORMANCE_WHEELS", ".venv-conformance/wheels"))
MODEL = "SmolLM2-135M-Instruct"
KITS = {
    "json_constrained_kit": "JSONConstrainedMixin",
    "json_mode_kit": "JSONModeMixin",
    "ebnf_constrained_kit": "EBNFConstrainedMixin",
    "regex_constrained_kit": "RegexConstrainedMixin",
}
# What a model of 135 million parameters can't answer, or not in the tokens that the test gives it.
BEYOND_THE_MODEL = {
    "test_json_generate": "a number may have any number of digits, and the model does not stop",
    "test_mix_json_and_other": "the same",
    "test_ebnf_generate_complex_json": "the grammar allows objects without a city, and samples have no seed",
    "test_regex_generate_complex_json": "any number of spaces and digits, and samples have no seed",
    "test_ebnf_generate_custom_log_format": "any number of letters, and samples have no seed",
    "test_regex_generate_custom_log_format": "the same",
    "streaming": "the model goes on to a second call, and the test joins the arguments of all",
    "multiturn": "the model does not repeat a tool's result",
    "parallel": "the model does not choose to call two tools",
    "thinking": "the model has no thoughts",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    (wheel,) = WHEELS.glob("sglang-*.whl")
    folder = tmp_path_factory.mktemp("sglang")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith("sglang/test/kits/") or name == "sglang/test/tool_call_test_runner.py":
                archive.extract(name, folder)
    return folder / "sglang" / "test"


@pytest.fixture(scope="module", params=[[], ["--speculative-algorithm", "ngram"]], ids=["plain", "ngram"])
def server(request):
    with running_server("--allow-any-model", "--max-model-len", "2048", *request.param) as url:
        yield url


def module_of(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kit", KITS)
def test_a_kit_passes(files, server, kit):
    mixin = getattr(module_of(files / "kits" / f"{kit}.py"), KITS[kit])
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none") as client:
        case = type(kit, (mixin, unittest.TestCase), {"base_url": server, "model": MODEL, "client": client})
        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    assert result.testsRun > 0
    failed = {test.id().rpartition(".")[2]: text[-600:] for test, text in result.failures + result.errors}
    assert not {name: text for name, text in failed.items() if name not in BEYOND_THE_MODEL}


def test_tools_are_called(files, server, monkeypatch):
    class Launch(types.SimpleNamespace):
        """Instead of starting a server."""

    names = {
        "sglang": {}, "sglang.srt": {}, "sglang.test": {},
        "sglang.srt.utils": {"kill_process_tree": lambda pid: None},
        "sglang.test.test_utils": {
            "DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH": 0, "DEFAULT_URL_FOR_TEST": server, "ModelLaunchSettings": Launch,
            "popen_launch_server": lambda *given, **options: None,
        },
    }  # fmt: skip
    for name, fields in names.items():
        module = types.ModuleType(name)
        vars(module).update(fields)
        monkeypatch.setitem(sys.modules, name, module)
    runner = module_of(files / "tool_call_test_runner.py")
    model = Launch(model_path=MODEL, extra_args=[], env=None, variant=None)
    result = runner.run_tool_call_test(model, runner.ToolCallTestParams(), server)
    assert [failure for failure in result.failures if failure.partition(":")[0] not in BEYOND_THE_MODEL] == []
    assert result.num_passed >= 5
