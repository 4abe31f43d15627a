"""Decides whether a call is served: finds its key, and checks the key's rights."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping

from quire.cluster.auth.access_rules import Right
from quire.cluster.auth.key_ring import KeyRing, LoadedKey
from quire.cluster.auth.keyed_service import KeyedService
from quire.cluster.auth.request_bill import Ledger
from quire.protos.errors import PermissionDenied, QuireError, Unauthenticated
from quire.protos.metric_families import Page
from quire.router.types import Service

_SCHEME = b"bearer "
_BASIC = b"basic "


class AccessControl:
    """The keys of a router and the bills of its requests."""

    def __init__(self, ring: KeyRing, ledger: Ledger):
        self.ring = ring
        self.ledger = ledger

    def caller(self, secret: bytes | None, needed: Right) -> LoadedKey | None:
        """Return the key of a call that is allowed; None if the route is open and the call has no valid key.

        Parameters
        ----------
        secret
            What the client sent as its key.

        Raises
        ------
        Unauthenticated
            The call has no key, or it is unknown or expired.
        PermissionDenied
            The key lacks the right.
        """
        key = None if secret is None else self.ring.find(secret)
        if needed is Right.OPEN or (key is not None and needed in key.rights):
            return key
        error: QuireError
        if key is None:
            error = Unauthenticated(
                "a key is required: send Authorization: Bearer KEY, or x-api-key"
                if secret is None
                else "the key is not valid"
            )
        elif needed is Right.DENIED:
            error = PermissionDenied("no key may call this")
        else:
            error = PermissionDenied(f"the key lacks the right {needed.value!r}")
        self.ledger.counters.on_denied(error.code)
        raise error

    def service(self, service: Service, key: LoadedKey | None) -> KeyedService:
        """Return the service as the owner of a key may use it."""
        return KeyedService(service, key, self.ledger)

    def metrics_page(self, labels: Mapping[str, str]) -> Page:
        """Return the metrics of tenants; `labels` name this router."""
        ledger = self.ledger
        ledger.counters.read_keys(self.ring.keys(), ledger.clock(), ledger.num_routers())
        return ledger.counters.metrics.page(labels)

    def close(self) -> None:
        """Stop reading the key file, and write the usage log to its end. This waits for the disk."""
        self.ring.close()
        if self.ledger.log is not None:
            self.ledger.log.close()


def secret_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """Return the key of a call: the first bearer token, else the first `x-api-key`.

    Parameters
    ----------
    headers
        Pairs of a name in lower case and a value, as ASGI has them.
    """
    api_key = None
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == _SCHEME:
            return value[7:].strip()
        if name == b"x-api-key" and api_key is None:
            api_key = value.strip()
    return api_key


def password_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """Return the key that a browser sent as the password of HTTP's Basic scheme; its user name may be anything.

    Parameters
    ----------
    headers
        As in `secret_of`.
    """
    for name, value in headers:
        if name == b"authorization" and value[:6].lower() == _BASIC:
            try:
                pair = base64.b64decode(value[6:].strip(), validate=True)
            except binascii.Error:
                return b""
            return pair.partition(b":")[2]
    return None


def secret_of_metadata(metadata: Iterable[tuple[str, str | bytes]]) -> bytes | None:
    """Return the key of a gRPC call, from its metadata."""
    return secret_of(
        (name.encode(), value.encode("latin-1", "replace") if isinstance(value, str) else value)
        for name, value in metadata
        if name in ("authorization", "x-api-key")
    )
