"""gRPC channels for clients behind HAProxy, which comes anew whenever Serve gives it other servers.

Then it says goodbye (GOAWAY) on its connections. A call that has not left the client is tried again by gRPC's core
(grpcio 1.85.1) at once and without a bound, until another thread has put the connection aside; what each trial needed
stays until the call ends. On busy machines the test process grew to 20 GB within half a minute, its memory full of
trials and "GOAWAY received", whereupon Ray killed replicas, routers and Serve's controller for want of memory; or the
next call ended it ("Check failed: request.max() <= MemoryRequest::max_allowed_size()": it asks for as much as the
channel's calls so far have needed). So these channels have no transparent retries, and who uses them asks again after a
pause.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

PAUSE_S = 0.05
MAX_TRIALS = 200
_NO_RETRIES = ("grpc.enable_retries", 0)


def was_not_sent(error: grpc.RpcError) -> bool:
    """Whether the connection said goodbye before the server took the call."""
    return "GOAWAY received" in (error.details() or "")


def aio_channel(address: str, *options: tuple[str, int]) -> grpc.aio.Channel:
    """One whose calls fail where `was_not_sent`; the caller asks again."""
    return grpc.aio.insecure_channel(address, options=[_NO_RETRIES, *options])


def patient_channel(address: str, *options: tuple[str, int]) -> grpc.Channel:
    """One that asks again by itself, for unary calls and streams of answers."""
    channel = grpc.insecure_channel(address, options=[_NO_RETRIES, *options])
    return grpc.intercept_channel(channel, _AskAgain())


class _AskAgain(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    def intercept_unary_unary(self, continuation: Callable, details: Any, request: Any) -> Any:
        for _ in range(MAX_TRIALS):
            call = continuation(details, request)
            error = call.exception()
            if error is None or not was_not_sent(error):
                break
            time.sleep(PAUSE_S)
        return call

    def intercept_unary_stream(self, continuation: Callable, details: Any, request: Any) -> Any:
        return _Stream(lambda: continuation(details, request))


class _Stream:
    """A call's answers; everything else about the call is that of the last trial."""

    def __init__(self, ask: Callable[[], Any]):
        self._ask = ask
        self._call = ask()
        self._num_trials = 1
        self._has_begun = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while True:
            try:
                message = next(self._call)
            except grpc.RpcError as error:
                if self._has_begun or self._num_trials >= MAX_TRIALS or not was_not_sent(error):
                    raise
                time.sleep(PAUSE_S)
                self._num_trials += 1
                self._call = self._ask()
            else:
                self._has_begun = True
                return message

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)
