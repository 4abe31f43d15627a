"""The TLS listener of one application on one node: an actor with an HAProxy of its own.

    router ──keep, every 5 s──▶ TlsListener ──runtime API──▶ HAProxy ◀──TLS── clients
    controller ◀──which routers?── │
    files ◀──changed?───────────── ┘

The actor is detached, so streams through it do not depend on the router that made it. It ends when no router has called
`keep` for `LEASE_S`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from quire.cluster.config.tls_section import TlsArgs
from quire.cluster.proxies.ray_proxies import serve_settings
from quire.cluster.tls.certificates import CertificateError, Certificates, read_certificates
from quire.cluster.tls.listener_process import ListenerError, ListenerProcess, RouterAddress

logger = logging.getLogger("ray.serve")

LEASE_S = 30.0
POLL_S = 1.0
# At the end streams have this time, as much as a draining router has at most by default.
FINISH_TIMEOUT_S = 60.0
_LOCALHOST = "127.0.0.1"


class TlsListener:
    """Runs HAProxy, follows the routers of an application and the files of its certificates.

    Parameters
    ----------
    application
        Name of the Serve application.
    folder
        See `ListenerProcess`.
    """

    def __init__(self, application: str, folder: str):
        from ray.serve._private.haproxy import get_haproxy_binary

        self._application = application
        self._process = ListenerProcess(Path(folder), get_haproxy_binary(), serve_settings())
        self._node_ip = ray.util.get_node_ip_address()
        self._args: TlsArgs | None = None
        self._since_s = 0.0
        self._kept_s = time.monotonic()
        self._certificates: Certificates | None = None
        self._problem = ""
        self._controller: ActorHandle | None = None
        self._lock = asyncio.Lock()
        self._task = asyncio.get_running_loop().create_task(self._follow())

    async def keep(self, args: dict[str, Any], since_s: float) -> str | None:
        """Serve for `LEASE_S` more.

        Parameters
        ----------
        args
            `TlsArgs` as plain data.
        since_s
            When the calling router started, in seconds since 1970: during an update the newest router's arguments
            apply.

        Returns
        -------
        Why the listener does not run; None if it runs.
        """
        self._kept_s = time.monotonic()
        wanted = TlsArgs.model_validate(args)
        async with self._lock:
            if since_s >= self._since_s:
                self._since_s = since_s
                if wanted != self._args or self._process.pid is None:
                    return await self._start(wanted)
        return None if self._process.pid is not None else "HAProxy has ended"

    async def pid(self) -> int | None:
        """Process id of HAProxy."""
        return self._process.pid

    async def _start(self, args: TlsArgs) -> str | None:
        """Start with these arguments; return the reason if they cannot be used."""
        try:
            certificates = await asyncio.to_thread(read_certificates, args)
            await self._process.start(args, certificates)
        except (CertificateError, ListenerError, OSError) as error:
            return str(error)
        self._args, self._certificates = args, certificates
        await self._follow_routers()
        logger.info("TLS listener on ports %d and %d", args.http_port, args.grpc_port)
        return None

    async def _follow(self) -> None:
        while time.monotonic() - self._kept_s < LEASE_S:
            await asyncio.sleep(POLL_S)
            async with self._lock:
                await self._step()
        try:
            await asyncio.wait_for(self._process.finish(), FINISH_TIMEOUT_S)
        except TimeoutError:
            await self._process.kill()
        # `exit_actor` works in methods only.
        ray.kill(ray.get_runtime_context().current_actor)

    async def _step(self) -> None:
        """Bring HAProxy up to date. A problem is logged once, and what runs stays."""
        args, certificates = self._args, self._certificates
        if args is None or certificates is None:
            return
        problem = ""
        try:
            if self._process.pid is None:
                logger.warning("HAProxy of the TLS listener has ended; it starts again")
                await self._process.start(args, certificates)
            await self._follow_routers()
            await self._follow_files(args)
        except (CertificateError, ListenerError, OSError) as error:
            problem = str(error)
        except Exception as error:
            # The listener follows its routers after any error.
            problem = repr(error)
        if problem and problem != self._problem:
            logger.error("the TLS listener stays as it is: %s", problem)
        self._problem = problem

    async def _follow_files(self, args: TlsArgs) -> None:
        certificates = await asyncio.to_thread(read_certificates, args)
        if certificates != self._certificates:
            await self._process.use(certificates)
            self._certificates = certificates
            logger.info("new certificates, valid until %s", certificates.expires.isoformat())

    async def _follow_routers(self) -> None:
        routers = await self._routers()
        # While Serve builds an application again, it reports no router. Health checks find those that have ended.
        if routers:
            await self._process.set_routers(routers)

    async def _routers(self) -> list[RouterAddress]:
        """Return where the application's routers listen; empty if the controller does not answer."""
        from ray.serve._private.common import RequestProtocol
        from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

        try:
            controller: Any = self._controller or await asyncio.to_thread(
                ray.get_actor, SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE
            )
            self._controller = controller
            # As HAProxy's manager gets them. With Ray's own proxy these are the proxies, for all applications.
            groups = await asyncio.wait_for(
                controller.get_target_groups.remote(from_proxy_manager=True), 5 * POLL_S
            )
        except (ValueError, TimeoutError, ray.exceptions.RayError) as error:
            logger.debug("Serve's controller does not answer: %s", error)
            self._controller = None
            return []
        ports: dict[tuple[str, str], dict[Any, int]] = {}
        for group in groups:
            if group.app_name in (self._application, ""):
                for target in group.targets:
                    ip = _LOCALHOST if target.ip == self._node_ip else target.ip
                    ports.setdefault((target.name, ip), {})[group.protocol] = target.port
        return [
            RouterAddress(ip, found[RequestProtocol.HTTP], found.get(RequestProtocol.GRPC))
            for (_, ip), found in ports.items()
            if RequestProtocol.HTTP in found
        ]
