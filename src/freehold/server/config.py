"""Everything about the HTTP server that can be chosen at start-up."""

from __future__ import annotations

from dataclasses import dataclass

from freehold.options import Limits, check_limits, option

SERVER, ACCESS, LOGS = "Server", "Access", "Logs"
LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


@dataclass(frozen=True)
class ServerConfig:
    """Options of `freehold serve` that do not concern the engine. Raises ValueError naming the option."""

    host: str = option("127.0.0.1", "Address to listen on.", SERVER)
    port: int = option(8000, "Port to listen on.", SERVER, Limits(least=0, most=65535))
    served_model_name: str | None = option(None, "Name of the model in /v1/models. Default: the file's.", SERVER)
    session_store: str | None = option(None, "SQLite file in which sessions survive restarts.", SERVER)
    session_store_recover: bool = option(
        False, "Put a damaged session store aside, and keep what can be read of it.", SERVER
    )
    max_restarts: int = option(
        3, "How often an engine process that has ended is started again.", SERVER, Limits(least=0)
    )
    drain_timeout: float = option(
        30.0, "Seconds that running requests have to end after SIGTERM.", SERVER, Limits(least=0)
    )
    max_body_bytes: int | None = option(
        None,
        "Maximum size of a request's body. Default: 4 MiB, more for contexts over 64k.",
        SERVER,
        Limits(least=1024),
        is_size=True,
    )
    body_timeout: float = option(60.0, "Seconds in which a request's body must arrive.", SERVER, Limits(above=0))
    header_timeout: float = option(10.0, "Seconds in which a request's headers must arrive.", SERVER, Limits(above=0))
    max_connections: int = option(4096, "Maximum number of open connections.", SERVER, Limits(least=1))
    max_connections_per_client: int = option(
        1024, "Maximum number of open connections from one address.", SERVER, Limits(least=1)
    )
    max_outputs_per_request: int = option(
        256, "Maximum number of outputs of one request: prompts times n.", SERVER, Limits(least=1)
    )
    api_key: tuple[str, ...] = option(
        (), "Key that clients must send. Give several to tell clients apart.", ACCESS, is_secret=True
    )
    admin_api_key: str | None = option(
        None, "Key for operators: flush, pins, pauses, weights, debug routes, sessions of other clients.", ACCESS,
        is_secret=True,
    )  # fmt: skip
    api_key_file: str | None = option(
        None, "TOML file with [[keys]]: key, name, admin, salt, requests_per_minute, tokens_per_minute, concurrency.",
        ACCESS,
    )  # fmt: skip
    isolate_keys: bool = option(False, "Give each key a prefix cache of its own.", ACCESS)
    log_requests: bool = option(
        False, "Write a line of JSON for each request: client, tokens, times and end, never content.", LOGS
    )
    log_level: str = option("warning", "Log level of the HTTP server.", LOGS, Limits(choices=LOG_LEVELS))

    def __post_init__(self) -> None:
        check_limits(self)
