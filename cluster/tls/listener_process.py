"""The HAProxy process of a TLS listener: start, new certificates and routers while it runs, end.

HAProxy is not restarted for new certificates or routers: both go through its runtime API, so no connection is closed.
New arguments, such as another port, start a new process; the old one finishes its streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from quire.cluster.config.tls_section import TlsArgs
from quire.cluster.tls.certificates import Certificates
from quire.cluster.tls.listener_config import (
    GRPC_BACKEND,
    HTTP_BACKEND,
    NUM_SLOTS,
    ListenerFiles,
    configuration,
    slot,
)

logger = logging.getLogger("ray.serve")

START_TIMEOUT_S = 10.0
_ANSWER_TIMEOUT_S = 5.0
_POLL_S = 0.05
_LOG_LINES = 5


class ListenerError(ValueError):
    """The listener cannot do what it was asked for; the message says why."""


@dataclass(frozen=True, slots=True, order=True)
class RouterAddress:
    """Where a router listens, as seen from the listener's node."""

    ip: str
    http_port: int
    grpc_port: int | None


class ListenerProcess:
    """One HAProxy with TLS.

    Parameters
    ----------
    folder
        For configuration and socket. It is made if it is missing; only this user can read it.
    binary
        Path of HAProxy.
    settings
        See `configuration`.
    """

    def __init__(self, folder: Path, binary: str, settings: Mapping[str, str]):
        self._settings = settings
        self._files = ListenerFiles(folder)
        self._binary = binary
        self._process: asyncio.subprocess.Process | None = None
        self._log: asyncio.Task[None] | None = None
        self._last_lines: list[str] = []
        self._slots: list[RouterAddress | None] = [None] * NUM_SLOTS

    @property
    def pid(self) -> int | None:
        """Process id while HAProxy runs."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def start(self, args: TlsArgs, certificates: Certificates) -> None:
        """Start HAProxy, without routers. A process that listens already stops to, and finishes its streams.

        Raises
        ------
        ListenerError
            HAProxy does not run; the message names the port if another process has it.
        """
        folder = self._files.folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Of this object, or of an actor that has died.
        old_pid = await self._listening_pid()
        if old_pid is None:
            _check_ports(args)
        self._files.config.write_text(configuration(args, self._files, self._settings))
        try:
            _write_secret(self._files.server, certificates.server)
            if certificates.client_authorities is not None:
                _write_secret(self._files.client_authorities, certificates.client_authorities)
            command = [self._binary, "-db", "-f", str(self._files.config)]
            if old_pid is not None:
                command += ["-sf", str(old_pid)]
            self._slots = [None] * NUM_SLOTS
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
            )
            self._log = asyncio.create_task(self._keep_log(self._process))
            await self._until_it_listens()
        finally:
            self._files.server.unlink(missing_ok=True)
            self._files.client_authorities.unlink(missing_ok=True)

    async def use(self, certificates: Certificates) -> None:
        """Use these certificates for new connections.

        Raises
        ------
        ListenerError
            HAProxy refuses them, and keeps what it has.
        """
        await self._exchange("cert", self._files.server, certificates.server)
        if certificates.client_authorities is not None:
            await self._exchange(
                "ca-file", self._files.client_authorities, certificates.client_authorities
            )

    async def set_routers(self, routers: Iterable[RouterAddress]) -> None:
        """Send requests to these routers only. Streams of other routers continue.

        Raises
        ------
        ListenerError
            HAProxy does not answer.
        """
        wanted = set(routers)
        for i, router in enumerate(self._slots):
            if router is not None and router not in wanted:
                await self._command(f"set server {HTTP_BACKEND}/{slot(i)} state maint")
                self._slots[i] = None
        free = [i for i, router in enumerate(self._slots) if router is None]
        new = sorted(wanted.difference(filter(None, self._slots)))
        if len(new) > len(free):
            logger.error("the TLS listener has room for %d routers, got %d", NUM_SLOTS, len(wanted))
        for i, router in zip(free, new, strict=False):
            for backend, port in (
                (HTTP_BACKEND, router.http_port),
                (GRPC_BACKEND, router.grpc_port),
            ):
                if port is not None:
                    await self._command(
                        f"set server {backend}/{slot(i)} addr {router.ip} port {port}"
                    )
            await self._command(f"set server {HTTP_BACKEND}/{slot(i)} state ready")
            self._slots[i] = router

    async def finish(self) -> None:
        """Take no new connections, and return when all streams have ended."""
        process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGUSR1)
            await process.wait()

    async def kill(self) -> None:
        """End the process and its streams at once."""
        process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _until_it_listens(self) -> None:
        process = self._process
        assert process is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_TIMEOUT_S):
                while process.returncode is None:
                    if await self._listening_pid() == process.pid:
                        return
                    await asyncio.sleep(_POLL_S)
        if process.returncode is None:
            await self.kill()
        if self._log is not None:
            await self._log
        raise ListenerError(f"HAProxy does not start: {' '.join(self._last_lines)}")

    async def _keep_log(self, process: asyncio.subprocess.Process) -> None:
        """Keep the last lines that HAProxy writes, until it ends."""
        lines: list[str] = []
        self._last_lines = lines
        assert process.stderr is not None
        async for line in process.stderr:
            text = line.decode(errors="replace").strip()
            if "[ALERT]" in text or not text.startswith("["):
                lines.append(text)
                del lines[:-_LOG_LINES]
                logger.debug("HAProxy of the TLS listener: %s", text)
        await process.wait()

    async def _listening_pid(self) -> int | None:
        try:
            found = re.search(r"^Pid: (\d+)$", await self._command("show info"), re.MULTILINE)
        except ListenerError:
            return None
        return int(found[1]) if found else None

    async def _exchange(self, kind: str, path: Path, pem: bytes) -> None:
        # An empty line ends the payload of a command.
        text = "\n".join(line for line in pem.decode().splitlines() if line)
        answer = await self._command(f"set ssl {kind} {path} <<\n{text}\n")
        if "ransaction" in answer:
            answer = await self._command(f"commit ssl {kind} {path}")
            if "Success" in answer:
                return
            await self._command(f"abort ssl {kind} {path}")
        raise ListenerError(f"HAProxy refuses the new {kind}: {answer.strip()[-300:]}")

    async def _command(self, text: str) -> str:
        """Send a command to HAProxy's runtime API and return its answer."""
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                reader, writer = await asyncio.open_unix_connection(str(self._files.socket))
                try:
                    writer.write(f"{text}\n".encode())
                    return (await reader.read()).decode(errors="replace")
                finally:
                    writer.close()
        except (OSError, TimeoutError) as error:
            raise ListenerError(f"HAProxy does not answer: {error!r}") from None


def _check_ports(args: TlsArgs) -> None:
    """Refuse a port that another process has: HAProxy would share it with another HAProxy."""
    family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
    for name, port in (("http_port", args.http_port), ("grpc_port", args.grpc_port)):
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((args.host, port))
            except OSError as error:
                raise ListenerError(
                    f"tls.{name}: cannot listen on {args.host} port {port}: {error.strerror}"
                ) from None


def _write_secret(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
