"""The ASGI layer that lets a request in: it needs the right of the route that the router of the application picks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextvars import ContextVar

from fastapi import FastAPI
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.cluster.auth.access_control import AccessControl, password_of, secret_of
from quire.cluster.auth.access_rules import HTTP_RULES, Right
from quire.cluster.auth.key_ring import LoadedKey
from quire.cluster.auth.keyed_service import KeyedService, rate_headers
from quire.protos.errors import Unauthenticated
from quire.router.types import Service

# A browser that reads this asks its user for a password, and sends it to this server until it is closed.
_BROWSER_CHALLENGE = {"www-authenticate": 'Basic realm="Quire", charset="UTF-8"'}
_MAX_CACHED_PATHS = 256
# The key of the request that the present task answers.
_CALLER: ContextVar[LoadedKey | None] = ContextVar("caller", default=None)


class HttpDoor:
    """Checks the key of each request before its route runs.

    It does not see the answer, so it adds nothing to a token. It leaves a function that returns further headers of the
    answer in the request's state, under `answer_headers`.

    Routes that need `observe` also take the key as a password (`password_of`), so that a browser can open them. They
    change nothing, and other sites' scripts cannot read their answers: CORS allows no credentials.

    Parameters
    ----------
    get_access
        Returns the keys; called for each request.
    rules
        What each path needs, by the route's path as it is declared.
    routes
        The application's routes, in the order in which its router tries them.
    """

    def __init__(
        self,
        app: ASGIApp,
        get_access: Callable[[], AccessControl],
        rules: Mapping[str, Right],
        routes: list[BaseRoute],
    ):
        self._app = app
        self._get_access = get_access
        self._rules = rules
        self._routes = routes
        # Only method and path decide, so the last answers are kept.
        self._needed = functools.lru_cache(_MAX_CACHED_PATHS)(self._find)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        access = self._get_access()
        needed = self._needed(scope["method"], scope["path"], scope.get("root_path", ""))
        state = scope.setdefault("state", {})
        secret = secret_of(scope["headers"])
        if needed is Right.OBSERVE and secret is None:
            secret = password_of(scope["headers"])
        try:
            key = access.caller(secret, needed)
        except Unauthenticated:
            if needed is Right.OBSERVE:
                state["answer_headers"] = _BROWSER_CHALLENGE.copy
            raise
        if key is not None and key.entry.quotas.tokens_per_minute is not None:
            state["answer_headers"] = functools.partial(rate_headers, key, access.ledger)
        token = _CALLER.set(key)
        try:
            await self._app(scope, receive, send)
        finally:
            _CALLER.reset(token)

    def _find(self, method: str, path: str, root_path: str) -> Right:
        """Return what a request needs: the rule of the route that the router would pick.

        An unknown path needs a key, and a route without a rule is denied.
        """
        scope = {"type": "http", "method": method, "path": path, "root_path": root_path}
        partial: BaseRoute | None = None
        for route in self._routes:
            match, _ = route.matches(scope)
            if match is Match.FULL:
                return self._rule(route)
            if match is Match.PARTIAL and partial is None:
                partial = route
        return Right.ANY_KEY if partial is None else self._rule(partial)

    def _rule(self, route: BaseRoute) -> Right:
        return self._rules.get(getattr(route, "path", ""), Right.DENIED)


def add_door(
    app: FastAPI, get_service: Callable[[], Service], get_access: Callable[[], AccessControl]
) -> Callable[[], KeyedService]:
    """Put a door before all routes of an application.

    Returns
    -------
    A function that returns the service as the key of the present request may use it.
    """
    app.add_middleware(HttpDoor, get_access=get_access, rules=HTTP_RULES, routes=app.router.routes)
    return lambda: service_of_caller(get_service(), get_access())


def service_of_caller(service: Service, access: AccessControl) -> KeyedService:
    """Return the service as the key of the present request may use it; call it below `HttpDoor`."""
    return access.service(service, _CALLER.get())
