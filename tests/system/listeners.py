"""Which TCP ports a process listens on, by Linux' /proc."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from pathlib import Path


def listeners(pid: int) -> dict[int, str]:
    """Address by port."""
    sockets = set()
    with contextlib.suppress(OSError):  # it ended meanwhile
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                sockets.add(os.readlink(link))
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in sockets:
                address, _, port = local.partition(":")
                found[int(port, 16)] = _text(address)
    return found


def _text(address: str) -> str:
    """The kernel writes the words of an address in the machine's order."""
    words = [int(address[i : i + 8], 16) for i in range(0, len(address), 8)]
    packed = b"".join(socket.htonl(word).to_bytes(4, "big") for word in words)
    ip = ipaddress.ip_address(packed)
    return str(getattr(ip, "ipv4_mapped", None) or ip)
