"""The HTTP server's start-up options."""

from __future__ import annotations

from dataclasses import dataclass

from freehold.options import Limits, check_limits, option
from freehold.server.database import NORMAL, SYNCS
from freehold.text.answers.thinking import THINKING
from freehold.text.tools.formats import TOOL_FORMATS

SERVER, ACCESS, LOGS = "Server", "Access", "Logs"
AUTO, NONE = "auto", "none"
TOOL_CALL_PARSERS = (AUTO, NONE, *TOOL_FORMATS)
REASONING_PARSERS = (AUTO, NONE, *THINKING, "gpt_oss")
SESSION_BYTES_DEFAULT = 1 << 30
LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


@dataclass(frozen=True)
class ServerConfig:
    """Options of `freehold serve` apart from the engine's. Raises ValueError naming the option."""

    host: str = option("127.0.0.1", "Address to listen on.", SERVER)
    port: int = option(8000, "Port to listen on.", SERVER, Limits(least=0, most=65535))
    uds: str | None = option(None, "Unix socket to listen on instead of host and port.", SERVER)
    root_path: str = option("", "Path prefix behind a proxy, such as /llm.", SERVER)
    ssl_keyfile: str | None = option(None, "Private key for TLS, PEM.", SERVER)
    ssl_certfile: str | None = option(None, "Certificate for TLS, PEM.", SERVER)
    served_model_name: tuple[str, ...] = option(
        (), "Model name for clients. Repeat it for aliases. Default: the file's.", SERVER
    )
    allow_any_model: bool = option(False, "Serve requests for any model name with this model.", SERVER)
    session_store: str | None = option(None, "SQLite file that keeps sessions and responses across restarts.", SERVER)
    response_ttl: float = option(
        3600.0, "Seconds that a response can be continued from (previous_response_id).", SERVER, Limits(above=0)
    )
    session_store_recover: bool = option(
        False, "Move a damaged session store aside and recover its readable entries.", SERVER
    )
    session_sync: str = option(
        NORMAL,
        "When a turn survives power loss. full: before its last event is sent. normal: shortly after; a killed process "
        "loses nothing in either mode.",
        SERVER,
        Limits(choices=SYNCS),
    )
    session_memory_bytes: int = option(
        SESSION_BYTES_DEFAULT,
        "Bytes of session histories in memory, such as 1GB. Others are read from the session store when "
        "used; without a store, turns are refused.",
        SERVER,
        Limits(least=1024),
        is_size=True,
    )
    tool_call_parser: str = option(
        AUTO, "How the model writes tool calls. auto: from its chat template. none: no tools.", SERVER,
        Limits(choices=TOOL_CALL_PARSERS),
    )  # fmt: skip
    reasoning_parser: str = option(
        AUTO, "How the model marks thoughts. auto: from its chat template. none: as content.", SERVER,
        Limits(choices=REASONING_PARSERS),
    )  # fmt: skip
    max_restarts: int = option(3, "Maximum number of engine restarts per hour.", SERVER, Limits(least=0))
    drain_timeout: float = option(
        30.0, "Seconds for running requests to finish after SIGTERM.", SERVER, Limits(least=0)
    )
    max_body_bytes: int | None = option(
        None,
        "Maximum size of a request's body. Default: 4 MiB, more for contexts over 64k.",
        SERVER,
        Limits(least=1024),
        is_size=True,
    )
    body_timeout: float = option(60.0, "Time limit in seconds for a request's body.", SERVER, Limits(above=0))
    header_timeout: float = option(10.0, "Time limit in seconds for a request's headers.", SERVER, Limits(above=0))
    max_connections: int = option(4096, "Maximum number of open connections.", SERVER, Limits(least=1))
    max_connections_per_client: int = option(
        1024, "Maximum number of open connections from one address.", SERVER, Limits(least=1)
    )
    max_outputs_per_request: int = option(
        256, "Maximum number of outputs of one request: prompts times n.", SERVER, Limits(least=1)
    )
    api_key: tuple[str, ...] = option(
        (), "Key that clients must send. Repeat it, one per client.", ACCESS, is_secret=True
    )
    admin_api_key: str | None = option(
        None, "Key for operators: flush, pins, pauses, weights, debug routes, sessions of other clients.", ACCESS,
        is_secret=True,
    )  # fmt: skip
    api_key_file: str | None = option(
        None, "TOML file with [[keys]]: key, name, admin, salt, requests_per_minute, tokens_per_minute, concurrency.",
        ACCESS,
    )  # fmt: skip
    allowed_origins: tuple[str, ...] = option(
        (), "Origin whose pages may call the server from a browser (CORS), or *. Repeat it for several.", ACCESS
    )
    isolate_keys: bool = option(False, "Give each key a separate prefix cache.", ACCESS)
    log_requests: bool = option(
        False, "Log a line of JSON per request: client, tokens, times and outcome, never content.", LOGS
    )
    otlp_traces_endpoint: str | None = option(
        None, "Collector of one span per request (OTLP over HTTP), such as http://host:4318/v1/traces.", LOGS
    )
    log_level: str = option("warning", "Log level of the HTTP server.", LOGS, Limits(choices=LOG_LEVELS))

    def __post_init__(self) -> None:
        check_limits(self)
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ValueError("ssl_keyfile: TLS needs both --ssl-keyfile and --ssl-certfile")
        if self.session_store_recover and self.session_store is None:
            raise ValueError("session_store_recover needs session_store: the file to recover")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ValueError(f"root_path: must begin with / and not end with it, not '{self.root_path}'")

    @property
    def address(self) -> str:
        """The server's URL or socket."""
        scheme = "http" if self.ssl_certfile is None else "https"
        return f"unix:{self.uds}" if self.uds is not None else f"{scheme}://{self.host}:{self.port}"
