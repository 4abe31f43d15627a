"""`quire top`: follows a router over gRPC, also one on another machine."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import grpc
from rich.console import Console
from rich.live import Live
from rich.text import Text

from quire.cluster.top.top_screen import TopScreen
from quire.protos import control_pb2 as control
from quire.protos import control_pb2_grpc

DEFAULT_TARGET = "127.0.0.1:9000"
_KEY_VARIABLE = "QUIRE_API_KEY"
_RETRY_S = 1.0


def add_top(commands: argparse._SubParsersAction) -> None:
    """Add the command to the parser of `quire`."""
    parser = commands.add_parser(
        "top",
        help="show replicas, queues, requests and migrations in the terminal",
        description="Follows the router at TARGET: the blocks of each replica by state, queues, the newest requests "
        "with the terms of their cost, migrations. Ctrl-C ends it. With keys, the variable "
        f"{_KEY_VARIABLE} has one with the right observe.",
    )
    parser.add_argument(
        "target",
        metavar="TARGET",
        nargs="?",
        default=DEFAULT_TARGET,
        help="host and port of the gRPC API (default: %(default)s)",
    )
    parser.add_argument(
        "--period-s", type=float, default=1.0, help="seconds between two states (default: 1)"
    )
    parser.add_argument("--once", action="store_true", help="print one state and end")
    parser.add_argument(
        "--tls",
        metavar="CA_FILE",
        nargs="?",
        const="",
        help="use TLS, and trust the certificates of CA_FILE instead of the system's",
    )
    parser.set_defaults(run=run_top)


def run_top(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    console, screen = Console(), TopScreen()
    request = control.WatchRouterRequest(period_ms=round(arguments.period_s * 1000))
    key = os.environ.get(_KEY_VARIABLE)
    metadata = (("authorization", f"Bearer {key}"),) if key else None
    with _channel(arguments) as channel:
        watch = control_pb2_grpc.ControlStub(channel).WatchRouter
        if arguments.once:
            try:
                state = next(watch(request, metadata=metadata, timeout=30))
            except grpc.RpcError as error:
                console.print(Text(_reason(error)))
                return 1
            console.print(screen.draw(state, max(40, console.height), console.width))
            return 0
        with Live(console=console, screen=True, auto_refresh=False) as live:
            try:
                _follow(watch, request, metadata, live, screen)
            except KeyboardInterrupt:
                return 0
    return 0


def _follow(
    watch: grpc.UnaryStreamMultiCallable,
    request: control.WatchRouterRequest,
    metadata: tuple[tuple[str, str], ...] | None,
    live: Live,
    screen: TopScreen,
) -> None:
    """Draw every state; when the router is lost, say so and try again."""
    while True:
        try:
            for state in watch(request, metadata=metadata):
                live.update(screen.draw(state, *_size(live.console)), refresh=True)
            problem = "the router ended the stream"
        except grpc.RpcError as error:
            problem = _reason(error)
        live.update(Text(f"connecting again: {problem}", "bold red"), refresh=True)
        time.sleep(_RETRY_S)


def _size(console: Console) -> tuple[int, int]:
    """Return the terminal's height and width."""
    return console.height, console.width


def _channel(arguments: argparse.Namespace) -> grpc.Channel:
    if arguments.tls is None:
        return grpc.insecure_channel(arguments.target)
    roots = Path(arguments.tls).read_bytes() if arguments.tls else None
    return grpc.secure_channel(arguments.target, grpc.ssl_channel_credentials(roots))


def _reason(error: grpc.RpcError) -> str:
    return f"{error.code().name}: {error.details()}" if isinstance(error, grpc.Call) else str(error)
