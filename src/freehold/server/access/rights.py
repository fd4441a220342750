"""The right that each route requires."""

from __future__ import annotations

from enum import StrEnum

from starlette.routing import compile_path


class Right(StrEnum):
    """The right that a route requires. Without keys, all routes are open."""

    OPEN = "open"
    CLIENT = "client"
    ADMIN = "admin"


RIGHTS: dict[str, Right] = {
    "/health": Right.OPEN,
    "/version": Right.OPEN,
    "/docs": Right.OPEN,
    "/docs/oauth2-redirect": Right.OPEN,
    "/redoc": Right.OPEN,
    "/openapi.json": Right.OPEN,
    "/v1/chat/completions": Right.CLIENT,
    "/v1/completions": Right.CLIENT,
    "/v1/embeddings": Right.CLIENT,
    "/v1/responses": Right.CLIENT,
    "/v1/responses/{name}": Right.CLIENT,
    "/v1/responses/{name}/cancel": Right.CLIENT,
    "/v1/responses/{name}/input_items": Right.CLIENT,
    "/v1/messages": Right.CLIENT,
    "/v1/messages/count_tokens": Right.CLIENT,
    "/v1/models": Right.CLIENT,
    "/v1/models/{name:path}": Right.CLIENT,
    "/v1/sessions": Right.CLIENT,
    "/v1/sessions/{name}": Right.CLIENT,
    "/v1/sessions/{name}/fork": Right.CLIENT,
    "/v1/sessions/{name}/rewind": Right.CLIENT,
    "/v1/sessions/{name}/save": Right.CLIENT,
    "/v1/sessions/{name}/restore": Right.CLIENT,
    "/v1/cache/lookup": Right.CLIENT,
    "/tokenize": Right.CLIENT,
    "/detokenize": Right.CLIENT,
    "/generate": Right.CLIENT,
    "/open_session": Right.CLIENT,
    "/close_session": Right.CLIENT,
    "/abort_request": Right.CLIENT,
    "/health_generate": Right.CLIENT,
    "/metrics": Right.CLIENT,
    "/model_info": Right.CLIENT,
    "/get_model_info": Right.CLIENT,
    "/server_info": Right.CLIENT,
    "/get_server_info": Right.CLIENT,
    "/v1/cache": Right.ADMIN,
    "/v1/cache/prefetch": Right.ADMIN,
    "/v1/cache/pins": Right.ADMIN,
    "/v1/cache/pins/{name:path}": Right.ADMIN,
    "/v1/cache/events": Right.ADMIN,
    "/hicache/storage-backend": Right.ADMIN,
    "/hicache/storage-backend/clear": Right.ADMIN,
    "/flush_cache": Right.ADMIN,
    "/debug/memory": Right.ADMIN,
    "/debug/miss": Right.ADMIN,
    "/debug/requests/{name}": Right.ADMIN,
    "/pause_generation": Right.ADMIN,
    "/continue_generation": Right.ADMIN,
    "/update_weights_from_disk": Right.ADMIN,
    "/load_lora_adapter": Right.ADMIN,
    "/v1/load_lora_adapter": Right.ADMIN,
    "/unload_lora_adapter": Right.ADMIN,
    "/v1/unload_lora_adapter": Right.ADMIN,
}
_PATTERNS = [(compile_path(path)[0], right) for path, right in RIGHTS.items()]


def right_of(path: str) -> Right:
    """Return the right for a path. Unknown paths need a key too, so that strangers learn nothing."""
    return next((right for pattern, right in _PATTERNS if pattern.match(path)), Right.CLIENT)
