"""Models from the hub: which file of a repository, and a fetch from a small hub of our own."""

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from gguf_writer import write_gguf
from tiny_models import TINY_MODELS, save_random

from freehold.contract.errors import ModelUnavailable
from freehold.models.loading.resolve import choose_file

FILES = ["README.md", "m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-Q8_0.gguf", "m-F16-00001-of-00002.gguf"]


@pytest.mark.parametrize(("files", "choice", "chosen"), [
    (["config.json", "m-Q8_0.gguf"], "", "m-Q8_0.gguf"),
    (FILES, "", "m-Q4_K_M.gguf"),
    (FILES, "q8_0", "m-Q8_0.gguf"),
    (FILES, "m-Q4_K_S.gguf", "m-Q4_K_S.gguf"),
    (["a/m-Q4_0.gguf", "m-IQ4_0.gguf", "m-Q4_0.gguf"], "m-Q4_0.gguf", "m-Q4_0.gguf"),
])  # fmt: skip
def test_the_file_that_is_meant(files, choice, chosen):
    assert choose_file("o/m", files, choice) == chosen


@pytest.mark.parametrize(("files", "choice", "message"), [
    (["README.md"], "", "o/m has no safetensors and no GGUF file in one piece"),
    (["m-F16-00001-of-00002.gguf"], "", "no GGUF file in one piece"),
    (["m-Q5_0.gguf", "m-Q8_0.gguf"], "", "several GGUF files: name one as o/m:FILE, of m-Q5_0.gguf, m-Q8_0.gguf"),
    (FILES, "Q4_K", "several GGUF files"),
    (FILES, "Q2_K", "no GGUF file with 'Q2_K' in its name"),
])  # fmt: skip
def test_a_choice_that_is_not_clear(files, choice, message):
    with pytest.raises(ModelUnavailable, match=message):
        choose_file("o/m", files, choice)


@pytest.fixture
def hub(tmp_path):
    """A server that speaks as much of the hub's protocol as its client needs -> its address."""
    (tmp_path / "model").mkdir()
    save_random(TINY_MODELS["llama"].make_config(), 5, torch.float32, tmp_path / "model")
    write_gguf(tmp_path / "model", tmp_path / "m-Q4_K_M.gguf")
    data = (tmp_path / "m-Q4_K_M.gguf").read_bytes()

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.answer(b"" if self.path.startswith("/api") else data)

        def do_GET(self):
            names = ("m-Q4_K_M.gguf", "m-Q8_0.gguf")
            files = [{"type": "file", "path": name, "size": 1, "oid": "0" * 40} for name in names]
            about = files if "/tree/" in self.path else {"id": "o/m", "sha": "0" * 40}
            self.answer(json.dumps(about).encode() if self.path.startswith("/api") else data)

        def answer(self, body):
            self.send_response(200)
            for name, value in (("Content-Length", len(body)), ("ETag", '"1"'), ("X-Repo-Commit", "0" * 40)):
                self.send_header(name, str(value))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", data
    server.shutdown()


def test_a_file_is_fetched(hub, tmp_path):
    """In a process of its own: the hub's client reads its address when it is imported."""
    address, data = hub
    program = (
        "from freehold.models.loading.resolve import resolve_model, open_checkpoint\n"
        "path = resolve_model('o/m')\n"
        "assert open_checkpoint(path).spec.layer_count == 4\n"
        "print(path)\n"
    )
    environment = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    with open(done.stdout.strip(), "rb") as file:
        assert file.read() == data
