"""Options for publishing events."""

from __future__ import annotations

import msgspec


class EventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of vLLM's `--kv-events-config`. `buffer_steps`: batches kept for followers that missed some."""

    enable_kv_cache_events: bool = False
    publisher: str = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    @classmethod
    def parse(cls, text: str) -> EventsConfig:
        """Parse JSON. Raise ValueError naming the option and the key."""
        try:
            config = msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise ValueError(f"kv_events_config: {error}") from error
        if config.publisher not in ("zmq", "null"):
            raise ValueError(f"kv_events_config: publisher must be zmq or null, not '{config.publisher}'")
        return config

    @property
    def is_on(self) -> bool:
        return self.enable_kv_cache_events and self.publisher == "zmq"


def binds(endpoint: str) -> bool:
    """Return whether the publisher binds the endpoint; otherwise it connects to it (vLLM's rule)."""
    return "*" in endpoint or "::" in endpoint or not endpoint.startswith("tcp://")
