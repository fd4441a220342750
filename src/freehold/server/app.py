"""The HTTP application and its server."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from types import FrameType

import uvicorn
from fastapi import APIRouter, FastAPI
from fastapi.middleware.cors import CORSMiddleware

from freehold import __version__
from freehold.contract.errors import EngineUnavailable
from freehold.ipc.async_engine import AsyncEngine
from freehold.server.access.connections import Connections
from freehold.server.access.gate import Gate, GateLimits
from freehold.server.access.keys import Keys
from freehold.server.access.log import Record
from freehold.server.access.traces import Traces
from freehold.server.answers.served_format import ServedFormat
from freehold.server.anthropic.routes import anthropic_routes
from freehold.server.config import ServerConfig
from freehold.server.database import open_database
from freehold.server.errors import EXPECTED_ERRORS, respond_with_error
from freehold.server.native.control import native_control_routes
from freehold.server.native.generate import native_routes
from freehold.server.openai.chat import chat_routes
from freehold.server.openai.completions import completion_routes
from freehold.server.openai.embeddings import embedding_routes
from freehold.server.openai.tokenize import tokenizing_routes
from freehold.server.operator.adapters import adapter_routes
from freehold.server.operator.cache import cache_routes
from freehold.server.operator.control import control_routes
from freehold.server.operator.events import event_routes
from freehold.server.operator.memory import insight_routes
from freehold.server.operator.metrics import Metrics
from freehold.server.operator.status import status_routes
from freehold.server.operator.storage import storage_routes
from freehold.server.requests.job import Generator
from freehold.server.responses.routes import response_routes
from freehold.server.responses.store import ResponseStore
from freehold.server.served_models import ServedModels
from freehold.server.sessions.routes import session_routes
from freehold.server.sessions.saving import saving_routes
from freehold.server.sessions.store import SessionStore
from freehold.server.sessions.table import SessionTable

KEEP_ALIVE_S = 75  # longer than clients', so that no request meets a closing connection
CLOSING_TIMEOUT_S = 3  # for answers in progress after the requests have ended
BODY_BYTES = 4 << 20
BODY_BYTES_PER_TOKEN = 64  # of context: allows for JSON, escapes and several prompts


def create_app(
    engine: AsyncEngine,
    models: ServedModels,
    config: ServerConfig | None = None,
    sources: Mapping[str, str] | None = None,
) -> FastAPI:
    """Build the app around an engine, which starts and ends with it. It answers immediately, with 503 until the model
    is loaded. `sources` says where each option came from, for `/server_info`."""
    config = config or ServerConfig()
    keys = Keys.of(config)
    traces = None if config.otlp_traces_endpoint is None else Traces(config.otlp_traces_endpoint)
    tables = (SessionStore.tables, ResponseStore.tables)
    database = open_database(config.session_store, tables, config.session_sync, config.session_store_recover)
    sessions = SessionTable(
        engine, SessionStore(database), config.session_memory_bytes, request_timeout=engine.config.request_timeout
    )
    responses = ResponseStore(database, config.response_ttl)
    served = ServedFormat(engine, config.tool_call_parser, config.reasoning_parser)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(_start(engine, served)), asyncio.create_task(sessions.expire())]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await engine.shutdown()
        await asyncio.to_thread(database.close)
        if traces is not None:
            await asyncio.to_thread(traces.close)

    def body_limit() -> int:
        return config.max_body_bytes or max(BODY_BYTES, BODY_BYTES_PER_TOKEN * engine.context_length)

    app = FastAPI(title="Freehold", version=__version__, lifespan=lifespan)
    limits = GateLimits(body_limit, config.body_timeout)
    observers: list[Callable[[Record], None]] = [Record.write] if config.log_requests else []
    if traces is not None:
        observers.append(traces.write)
    app.add_middleware(Gate, keys=keys, limits=limits, observers=observers)
    if config.allowed_origins:
        # Outside the gate: browsers send preflight requests without a key.
        app.add_middleware(
            CORSMiddleware, allow_origins=config.allowed_origins, allow_methods=["*"], allow_headers=["*"],
            expose_headers=["x-request-id"],
        )  # fmt: skip
    for routes in _routes(engine, models, sessions, responses, served, config, sources or {}):
        app.include_router(routes)
    for kind in EXPECTED_ERRORS:
        app.add_exception_handler(kind, respond_with_error)
    return app


def _routes(
    engine: AsyncEngine,
    models: ServedModels,
    sessions: SessionTable,
    responses: ResponseStore,
    served: ServedFormat,
    config: ServerConfig,
    sources: Mapping[str, str],
) -> Iterator[APIRouter]:
    metrics = Metrics(engine, models.first)
    generator = Generator(engine, metrics, config.max_outputs_per_request)
    yield completion_routes(engine, generator, sessions, models)
    yield embedding_routes(engine, generator, models)
    yield chat_routes(engine, generator, sessions, models, served)
    yield session_routes(engine, sessions)
    yield saving_routes(engine, sessions)
    yield cache_routes(engine)
    yield response_routes(engine, generator, models, served, responses)
    yield anthropic_routes(engine, generator, models, served)
    yield native_routes(engine, generator, sessions, models)
    yield native_control_routes(engine, generator, sessions)
    yield status_routes(engine, models, config, sources)
    yield tokenizing_routes(engine)
    yield insight_routes(engine, metrics)
    yield control_routes(engine)
    yield adapter_routes(engine, models)
    yield storage_routes(engine)
    yield event_routes(engine)


async def _start(engine: AsyncEngine, served: ServedFormat) -> None:
    """Start the engine. The server reports a failure when it ends."""
    before = time.monotonic()
    with contextlib.suppress(EngineUnavailable):
        await engine.start()
        print(f"freehold: {served.describe()}", file=sys.stderr)
        if engine.info.quantized:
            print(f"freehold: weights are {engine.info.quantized}", file=sys.stderr)
        print(f"freehold: ready after {time.monotonic() - before:.1f} s", file=sys.stderr, flush=True)


class Server(uvicorn.Server):
    """Uvicorn with draining: running requests may finish, new ones are rejected. It exits if the engine cannot start or
    restart."""

    def __init__(self, engine: AsyncEngine, app: FastAPI, http: ServerConfig):
        limits = Connections(http.max_connections, http.max_connections_per_client, http.header_timeout)
        config = uvicorn.Config(
            app, host=http.host, port=http.port, uds=http.uds, root_path=http.root_path, log_level=http.log_level,
            ssl_keyfile=http.ssl_keyfile, ssl_certfile=http.ssl_certfile, timeout_graceful_shutdown=CLOSING_TIMEOUT_S,
            http=limits.protocol,  # pyright: ignore[reportArgumentType]
            ws="none",
            timeout_keep_alive=KEEP_ALIVE_S,
        )  # fmt: skip
        super().__init__(config)
        self._engine = engine
        self._drain_timeout = http.drain_timeout
        self._drain_end: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain on the first signal: new requests get 503. Exit on the second."""
        self._engine.draining = True
        if self._drain_end is None and self._engine.is_busy:
            self._drain_end = time.monotonic() + self._drain_timeout
        else:
            self.force_exit = self.should_exit
            self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        is_lost = self._engine.failure is not None
        is_drained = self._drain_end is not None and (
            not self._engine.is_busy or time.monotonic() >= self._drain_end or not self._engine.is_responsive
        )
        if is_drained:
            self._engine.abandon("the server is shutting down")
        return is_lost or is_drained or await super().on_tick(counter)
