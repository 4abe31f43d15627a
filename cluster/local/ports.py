"""TCP ports of a cluster on this machine: free ports, listening ports, and the machines that can reach them."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import random
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quire.cluster.config.config_problems import ConfigError, Problem
from quire.cluster.proxies.ray_settings import HAPROXY_VARIABLE, effective_variables

if TYPE_CHECKING:
    from quire.cluster.config.serve_config import ServeConfig

_LISTENS = "0A"  # a state in /proc/net/tcp

# Further ports in HAProxy mode, with Ray's defaults: HAProxy's statistics and metrics, and the Python proxies that get
# requests while HAProxy knows no router. HAProxy does not start if one of the first two is in use. Ray's Python proxies
# would share a port with those of another cluster on the machine, and each cluster would receive the other's requests.
_HAPROXY_PORTS = {
    "RAY_SERVE_HAPROXY_STATS_PORT": 8404,
    "RAY_SERVE_HAPROXY_METRICS_PORT": 9101,
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": 8500,
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": 9500,
}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address of a config's HTTP proxy on this machine."""

    scheme: str
    host: str
    port: int

    @classmethod
    def of(cls, config: ServeConfig) -> Endpoint:
        options = config.schema.http_options
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(options.host, options.host)
        return cls("https" if options.ssl_certfile else "http", host, options.port)

    def url(self, route_prefix: str, path: str) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{route_prefix.rstrip('/')}{path}"


def check_ports(config: ServeConfig) -> None:
    """Refuse a config with a port that another process uses; Ray would report the conflict only in a proxy's log.

    Two clusters in HAProxy mode on one machine need different ports for HAProxy's statistics and metrics and for the
    fallback proxies.

    Raises
    ------
    ConfigError
        Lists each port in use.
    """
    endpoint = Endpoint.of(config)
    problems = []
    listeners = {"http_options.port": (endpoint.host, endpoint.port)}
    if config.schema.grpc_options.grpc_servicer_functions:
        listeners["grpc_options.port"] = (endpoint.host, config.schema.grpc_options.port)
    for index, app in enumerate(config.applications):
        if app.config is not None and (tls := app.config.tls):
            for name in ("http_port", "grpc_port"):
                path = f"applications[{index}].args.tls.{name}"
                listeners[path] = (tls.host, getattr(tls, name))
    options = config.schema.controller_options
    env_vars = ((options and options.runtime_env) or {}).get("env_vars", {})
    if effective_variables(env_vars).get(HAPROXY_VARIABLE) == "1":
        for name, default in _HAPROXY_PORTS.items():
            if name.endswith("_GRPC_PORT") and "grpc_options.port" not in listeners:
                continue
            path = f"controller_options.runtime_env.env_vars.{name}"
            port = env_vars.get(name, str(default))
            if port.isdecimal() and 1 <= int(port) <= 65535:
                listeners[path] = ("0.0.0.0", int(port))
            else:
                problems.append(Problem(path, f"must be from 1 to 65535, got {port!r}"))
    for path, (host, port) in listeners.items():
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                problems.append(Problem(path, f"cannot listen on port {port}: {error.strerror}"))
    if problems:
        raise ConfigError(problems)


def free_ports(count: int) -> list[int]:
    """Find different unused TCP ports for a cluster that will listen on them in a few seconds.

    The ports are below the kernel's range for outgoing connections and for `bind` to port 0, because Ray takes hundreds
    of ports of that range while it starts. They are at least 20000, because Ray's workers listen on lower ports.
    """
    ports: list[int] = []
    for port in random.SystemRandom().sample(range(20_000, 32_768), 1000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise OSError(f"found {len(ports)} free ports from 20000 to 32767, wanted {count}")


def listeners(pids: Iterable[int]) -> set[tuple[str, int]]:
    """Addresses and TCP ports on which processes listen, from Linux' /proc; empty on other systems."""
    sockets = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # the process has ended
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    sockets.add(os.readlink(link))
    found = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            _, local, _, state, *rest = line.split()
            if state == _LISTENS and f"socket:[{rest[5]}]" in sockets:
                address, _, port = local.partition(":")
                found.add((_address(address), int(port, 16)))
    return found


def _address(digits: str) -> str:
    """Parse an address of /proc/net/tcp: 32-bit words in the machine's byte order."""
    words = (int(digits[i : i + 8], 16) for i in range(0, len(digits), 8))
    ip = ipaddress.ip_address(b"".join(socket.htonl(word).to_bytes(4, "big") for word in words))
    return str(getattr(ip, "ipv4_mapped", None) or ip)


def listening_lines(found: Iterable[tuple[str, int]]) -> Iterator[str]:
    """Lines for the user: the open ports by the machines that can reach them."""
    ports: dict[str, set[int]] = {}
    for address, port in sorted(found):
        ip = ipaddress.ip_address(address)
        if ip.is_loopback:
            who = "this machine only"
        elif ip.is_unspecified:
            who = "every machine that reaches this one"
        else:
            who = f"every machine that reaches {address}"
        ports.setdefault(who, set()).add(port)
    for who in sorted(ports):
        yield f"listens for {who}: {', '.join(map(str, sorted(ports[who])))}"
