"""Which right each HTTP route and each gRPC method needs. A route or method without a rule is denied to every key.

A path that no route has needs a key too, so that a client without one cannot find out which paths exist.
"""

from __future__ import annotations

from enum import Enum


class Right(Enum):
    """What a caller must have."""

    OPEN = "open"  # no key
    ANY_KEY = "any key"
    GENERATE = "generate"
    OBSERVE = "observe"
    ADMIN = "admin"
    DENIED = "denied"  # no key has it


# By the route's path as it is declared. An open route must answer without any detail.
HTTP_RULES = {
    "/health": Right.OPEN,
    "/ready": Right.OPEN,
    "/version": Right.ANY_KEY,
    "/v1/models": Right.ANY_KEY,
    "/v1/models/{model_id:path}": Right.ANY_KEY,
    "/v1/adapters": Right.ADMIN,
    "/v1/adapters/{name:path}": Right.ADMIN,
    "/v1/completions": Right.GENERATE,
    "/v1/chat/completions": Right.GENERATE,
    "/v1/chat/completions/render": Right.GENERATE,
    "/v1/messages": Right.GENERATE,
    "/v1/messages/count_tokens": Right.GENERATE,
    "/v1/responses": Right.GENERATE,
    "/v1/decisions": Right.GENERATE,
    "/v1/embeddings": Right.GENERATE,
    "/tokenize": Right.GENERATE,
    "/detokenize": Right.GENERATE,
    "/metrics": Right.OBSERVE,
    "/v1/router/explain": Right.OBSERVE,
    "/ui": Right.OBSERVE,
    "/ui/page.css": Right.OBSERVE,
    "/ui/page.js": Right.OBSERVE,
    "/ui/state": Right.OBSERVE,
    "/docs": Right.OBSERVE,
    "/redoc": Right.OBSERVE,
    "/openapi.json": Right.OBSERVE,
}

# By the method's name; the services' names do not overlap.
GRPC_RULES = {
    "Generate": Right.GENERATE,
    "GenerateOnce": Right.GENERATE,
    "Embed": Right.GENERATE,
    "Tokenize": Right.GENERATE,
    "Detokenize": Right.GENERATE,
    "Render": Right.GENERATE,
    "GetModelInfo": Right.ANY_KEY,
    "ListAdapters": Right.ANY_KEY,
    "LoadAdapter": Right.ADMIN,
    "UnloadAdapter": Right.ADMIN,
    "GetLoads": Right.OBSERVE,
    "WatchCache": Right.OBSERVE,
    "WatchRouter": Right.OBSERVE,
    "Check": Right.OPEN,
    "Watch": Right.OPEN,
}


def grpc_rule(method: str) -> Right:
    """Return what a gRPC method needs."""
    return GRPC_RULES.get(method, Right.DENIED)
