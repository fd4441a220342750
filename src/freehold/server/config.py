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
    api_key: tuple[str, ...] = option(
        (), "Key that clients must send. Give several to tell clients apart.", ACCESS, is_secret=True
    )
    admin_api_key: str | None = option(
        None, "Key for operators: flush, pins, pauses, weights, debug routes, sessions of other clients.", ACCESS,
        is_secret=True,
    )  # fmt: skip
    log_level: str = option("warning", "Log level of the HTTP server.", LOGS, Limits(choices=LOG_LEVELS))

    def __post_init__(self) -> None:
        check_limits(self)
