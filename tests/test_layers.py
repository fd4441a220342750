"""Layers import downwards only, and what must run without a library does not import it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "freehold"

# What each room may import of freehold, besides itself, the contract and the options. Modules without a room count as
# rooms.
LEAVES = {"contract", "config", "options", "lost_kernels"}
MAY_IMPORT = {
    "contract": set(),
    "options": set(),
    "config": set(),
    "memory": set(),
    "events": {"memory"},
    "scheduler": {"memory"},
    "models": set(),
    "store": set(),
    "engine": {"models", "store"},
    "text": {"models"},
    "simulation": {"memory", "scheduler"},
    "planning": {"memory", "scheduler", "simulation"},
    "runtime": {"memory", "scheduler", "models", "engine", "text", "events", "store"},
    "llm": {"memory", "scheduler", "models", "engine", "text", "runtime"},
    "ipc": {"memory", "scheduler", "models", "store", "text", "runtime"},
    "server": {"memory", "scheduler", "models", "text", "ipc", "events", "store", ""},
}
ONLY_IN_SERVER = {"fastapi", "uvicorn", "starlette", "pydantic", "orjson", "prometheus_client"}
ONLY_IN_IPC_AND_EVENTS = {"zmq", "msgspec"}
ONLY_IN_GRAMMAR = {"llguidance"}
ONLY_IN_STORE = {"redis", "obstore", "xxhash"}
NOT_BELOW_ENGINE = {"torch", "numba", "triton", "transformers"}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return found


def imported_modules(path: Path) -> set[str]:
    """With `from package import module` as the module's name."""
    found = imports(path)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def modules(layer: str) -> list[Path]:
    folder = SOURCE / layer
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [SOURCE / f"{layer}.py"]


@pytest.mark.parametrize("layer", MAY_IMPORT)
def test_a_layer_imports_only_what_is_below(layer):
    allowed = MAY_IMPORT[layer] | {layer} | (set() if layer == "contract" else LEAVES)
    for path in modules(layer):
        for name in imports(path):
            if name.split(".")[0] == "freehold":
                part = name.partition(".")[2].partition(".")[0]
                assert part in allowed, f"{path.relative_to(SOURCE)} imports {name}"


@pytest.mark.parametrize("layer", ["memory", "scheduler", "simulation", "planning"])
def test_memory_and_scheduler_need_no_model_library(layer):
    """The simulator's checks are compiled; nothing else of it is below the engine."""
    allowed = {"numba"} if layer == "simulation" else set()
    for path in modules(layer):
        used = {name.split(".")[0] for name in imports(path)}
        assert not used & NOT_BELOW_ENGINE - allowed, path


def test_no_module_imports_itself_through_others():
    """Imports for types count, too."""
    paths = SOURCE.rglob("*.py")
    files = {"freehold." + ".".join(path.relative_to(SOURCE).with_suffix("").parts): path for path in paths}
    graph = {name: {found for found in imported_modules(path) if found in files} for name, path in files.items()}
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " -> ".join([*way[way.index(name) :], name])
        if name not in done:
            for following in sorted(graph[name]):
                visit(following, (*way, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_libraries_of_a_layer_are_imported_there_alone():
    for path in SOURCE.rglob("*.py"):
        used = {name.split(".")[0] for name in imports(path)}
        # That one is run by other engines' Python, with programs of its folder.
        if "server" not in path.parts and path.name != "smallest_server.py":
            assert not used & ONLY_IN_SERVER, path
        if not {"ipc", "events"} & {*path.parts}:
            assert not used & ONLY_IN_IPC_AND_EVENTS, path
        if "store" not in path.parts:
            assert not used & ONLY_IN_STORE, path
        if "grammar" not in path.parts:
            assert not used & ONLY_IN_GRAMMAR, path


def test_the_engine_imports_without_the_server_libraries():
    """As on a machine that has none of them."""
    banned = sorted(ONLY_IN_SERVER | ONLY_IN_IPC_AND_EVENTS | {"typer", "rich", "httpx", "transformers"})
    program = (
        "import sys\n"
        f"for name in {banned!r}: sys.modules[name] = None\n"
        "import freehold, freehold.llm, freehold.simulation.world\n"
        "from freehold import LLM, SamplingParams\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_http_process_imports_no_kernel():
    program = (
        "import sys\n"
        "import freehold.server.launch\n"
        f"found = {sorted([*NOT_BELOW_ENGINE, 'httpx'])!r}\n"
        "assert not [name for name in found if name in sys.modules]\n"
        "assert not [name for name in sys.modules if name.startswith('freehold.engine.')]\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_within_memory_the_ledger_is_the_lowest_and_prefixes_know_no_leases():
    allowed = {"ledger": {"ledger"}, "prefix": {"group", "ledger", "prefix"}}
    for folder, below in allowed.items():
        for path in (SOURCE / "memory" / folder).glob("*.py"):
            for name in imported_modules(path):
                if name.startswith("freehold.memory."):
                    assert name.split(".")[2] in below, f"{path.name} imports {name}"


def test_only_assembly_chooses_the_device():
    for path in (SOURCE / "engine").rglob("*.py"):
        if "cpu" not in path.parts:
            assert not [name for name in imported_modules(path) if name.startswith("freehold.engine.cpu")], path


# Kernels are unrolled and take what they need as plain arguments.
KERNELS = {SOURCE / "engine" / "cpu", SOURCE / "simulation" / "model.py"}


def test_functions_fit_a_screen_and_classes_are_small():
    for path in SOURCE.rglob("*.py"):
        if path in KERNELS or path.parent in KERNELS:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 60, f"{path}: {node.name} is too long"
                parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                count = len([one for one in parameters if one.arg not in ("self", "cls")])
                assert count <= 8, f"{path}: {node.name} takes {count} parameters"
                if not any("njit" in ast.unparse(one) for one in node.decorator_list):
                    assert node.returns is not None or node.name == "__init__", f"{path}: {node.name} returns what?"
            if isinstance(node, ast.ClassDef):
                methods = [one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
                public = [one.name for one in methods if not one.name.startswith("_")]
                assert len(public) <= 20, f"{path}: {node.name} has {len(public)} public methods"


def test_files_are_short_and_names_say_something():
    for path in SOURCE.rglob("*.py"):
        assert path.read_text().count("\n") <= 400, f"{path} is too long"
        words = set(path.stem.split("_"))
        assert not words & {"utils", "helpers", "common", "manager", "mixin", "base", "util", "helper"}, path


def test_the_http_process_imports_no_kernels():
    code = """
import sys
import freehold.server.app, freehold.server.launch
found = [name for name in sys.modules if name.split(".")[0] in ("numba", "llvmlite", "torch", "transformers")]
found += [name for name in sys.modules if name.startswith("freehold.engine.") or name == "freehold.engine"]
assert not found, found
"""
    subprocess.run([sys.executable, "-c", code], check=True)
