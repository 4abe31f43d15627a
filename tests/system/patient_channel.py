"""gRPC channels for clients behind HAProxy, which comes anew whenever Serve gives it other servers.

Then it says goodbye (GOAWAY) on its connections. A call that has not left the client is tried again by gRPC's core
(grpcio 1.85.1) at once and without a bound, until another thread has put the connection aside; what each trial needed
stays until the call ends. On busy machines the test process grew to 20 GB within half a minute, its memory full of
trials and "GOAWAY received", whereupon Ray killed replicas, routers and Serve's controller for want of memory; or the
next call ended it ("Check failed: request.max() <= MemoryRequest::max_allowed_size()": it asks for as much as the
channel's calls so far have needed). So these channels have no transparent retries, and who uses them asks again after a
pause, on another connection: the channel may stay with the old one for longer than ten seconds. That takes a pool of
connections for each channel: gRPC gives all channels of a process to one address the same connection.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

PAUSE_S = 0.05
MAX_TRIALS = 200
_OPTIONS = (("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1))


def was_not_sent(error: grpc.RpcError) -> bool:
    """Whether the connection said goodbye before the server took the call."""
    return "GOAWAY received" in (error.details() or "")


def aio_channel(address: str, *options: tuple[str, int]) -> grpc.aio.Channel:
    """One whose calls fail where `was_not_sent`; the caller asks again."""
    return grpc.aio.insecure_channel(address, options=[*_OPTIONS, *options])


class PatientChannel:
    """One that asks again by itself, on another connection, for unary calls and streams of answers."""

    def __init__(self, address: str, *options: tuple[str, int]):
        self._address = address
        self._options = [*_OPTIONS, *options]
        self._channels = [grpc.insecure_channel(address, self._options)]

    def __enter__(self) -> PatientChannel:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channels[-1], name)

    def close(self) -> None:
        for channel in self._channels:
            channel.close()

    def unary_unary(self, *method: Any, **options: Any) -> _Unary:
        return _Unary(lambda: self._channels[-1].unary_unary(*method, **options), self.renew)

    def unary_stream(self, *method: Any, **options: Any) -> Callable:
        def ask(request: Any, **given: Any) -> _Stream:
            return _Stream(
                lambda: self._channels[-1].unary_stream(*method, **options)(request, **given),
                self.renew,
            )

        return ask

    def renew(self) -> None:
        """Calls that run stay on the connections that they have."""
        time.sleep(PAUSE_S)
        self._channels.append(grpc.insecure_channel(self._address, self._options))


class _Unary:
    def __init__(self, method: Callable[[], Any], renew: Callable[[], None]):
        self._method = method
        self._renew = renew

    def __call__(self, request: Any, **given: Any) -> Any:
        return self.with_call(request, **given)[0]

    def with_call(self, request: Any, **given: Any) -> tuple[Any, grpc.Call]:
        for trial in itertools.count(1):
            try:
                return self._method().with_call(request, **given)
            except grpc.RpcError as error:
                if trial == MAX_TRIALS or not was_not_sent(error):
                    raise
            self._renew()


class _Stream:
    """A call's answers; everything else about the call is that of the last trial."""

    def __init__(self, ask: Callable[[], Any], renew: Callable[[], None]):
        self._ask = ask
        self._renew = renew
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
                self._num_trials += 1
                self._renew()
                self._call = self._ask()
            else:
                self._has_begun = True
                return message

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)
