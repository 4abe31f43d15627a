"""The engine: generates tokens on one device. Names are imported on first use, because this imports torch."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_EXPORTS = {
    "Engine": "quire.replica.engine",
    "EngineArgs": "quire.replica.config",
    "RequestOutput": "quire.replica.offline",
    "SamplingParams": "quire.protos.wire",
    "StreamOutput": "quire.replica.offline",
}
__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)
