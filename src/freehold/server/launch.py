"""Runs a server in this process."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from freehold.config import EngineConfig
from freehold.ipc.async_engine import AsyncEngine
from freehold.models.loading.resolve import resolve_model
from freehold.server.access.keys import Keys
from freehold.server.app import Server, create_app
from freehold.server.config import ServerConfig
from freehold.server.served_models import ServedModels


def run_server(config: EngineConfig, http: ServerConfig, sources: Mapping[str, str]) -> int:
    """Serve until told to stop and return the exit code. `sources` says where each option came from. Raises ValueError
    for invalid options."""
    check_options(http)
    _check_address(http)
    engine = AsyncEngine(max_restarts=http.max_restarts, **vars(config))
    # Fetched here, before anything listens, so that the progress bar is visible.
    path = resolve_model(config.model)
    models = ServedModels(
        http.served_model_name or (served_name(path),), http.allow_any_model, lambda: engine.config.adapter_paths
    )
    print(f"Freehold serves {models.first} on {http.address} (loading ...)", file=sys.stderr, flush=True)
    app = create_app(engine, models, http, sources)
    server = Server(engine, app, http)
    server.run()
    if engine.failure:
        # Reported here because the server stops as soon as it sees that the engine is lost.
        print(f"freehold: the engine has failed: {engine.failure}", file=sys.stderr, flush=True)
    return 1 if engine.failure else 0


def check_options(http: ServerConfig) -> None:
    """Raise ValueError for an unusable key, file or folder. Opens no store and no port."""
    Keys.of(http)
    for name, file in (("ssl_keyfile", http.ssl_keyfile), ("ssl_certfile", http.ssl_certfile)):
        if file is not None and not Path(file).is_file():
            raise ValueError(f"{name}: there is no file {file}")
    for name, file in (("uds", http.uds), ("session_store", http.session_store)):
        if file is not None and not Path(file).absolute().parent.is_dir():
            raise ValueError(f"{name}: {file} can't be opened: there is no folder {Path(file).absolute().parent}")
    if http.session_store is not None and Path(http.session_store).is_dir():
        raise ValueError(f"session_store: {http.session_store} can't be opened: it is a folder")


def _check_address(http: ServerConfig) -> None:
    """Raise ValueError if the server can't listen on the address."""
    if http.uds is not None:
        return
    host, port = http.host, http.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ValueError(
            f"can't listen on {host}:{port}: {error.strerror}. Choose others with --host and --port"
        ) from None


def served_name(path: Path) -> str:
    """Shorten a model file's name: SmolLM2-135M-Instruct.Q4_1.gguf -> SmolLM2-135M-Instruct."""
    if path.is_dir():
        return path.name
    name = path.stem
    head, dot, last = name.rpartition(".")
    return head if dot and last[:1] in "QqFfBb" else name
