"""The process that checks grammars; `grammar_check.py` is the engine's side of it.

```
 engine ──socket──▶ this process: llguidance and the tokenizer are loaded once
                        │ fork, one at a time
                        ▼
                    a child with limits: compile, sampled masks ──pipe──▶ result
```

A grammar can only harm the forked child. The child has limits on CPU time, address space, stack and wall-clock time,
and it is killed when the engine's end of the socket closes. This needs neither /proc nor memory cgroups. The process
imports neither torch nor Ray.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import random
import resource
import select
import signal
import socket
import sys
import time
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from quire.replica.grammar.grammar_source import MAX_MEMORY_MIB, limits, message_of, to_source

# llguidance recurses into nested grammars. The engine's threads have twice this stack, so a grammar that passes here
# does not overflow theirs.
_STACK_BYTES = 4 << 20
_NUM_WALKS = 4
_WALK_LEN = 16
_WALKS_CPU_S = 0.05


def main() -> None:
    """Check the grammars that arrive on the socket until its other end closes."""
    options = json.loads(sys.argv[1])
    for number in (signal.SIGPROF, signal.SIGALRM, signal.SIGXCPU, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    # When memory is short, the kernel should kill this process first.
    with contextlib.suppress(OSError):
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    os.nice(options["nice"])
    connection = socket.socket(fileno=options["fd"])
    try:
        tokenizer = LLTokenizer(
            options["tokenizer_path"],
            n_vocab=options["vocab_size"],
            eos_token=options["eos_token_ids"],
        )
    except Exception as error:
        # The library raises errors of several types for tokenizers that it does not support.
        _send(connection, {"outcome": "unusable", "message": message_of(str(error))})
        return
    _send(connection, {"outcome": "ready"})
    used_bytes = address_space_bytes()
    for line in connection.makefile("rb"):
        job = json.loads(line)
        _send(connection, _check_in_child(connection, tokenizer, job, used_bytes))


def address_space_bytes() -> int:
    """Measure how much address space this process uses, without /proc.

    Binary search for the smallest limit under which the process can still map a page.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    low, high = 0, 1 << 47
    if hard != resource.RLIM_INFINITY:
        high = min(high, hard)
    while high - low > 1 << 20:
        middle = (low + high) // 2
        resource.setrlimit(resource.RLIMIT_AS, (middle, hard))
        try:
            mmap.mmap(-1, mmap.PAGESIZE).close()
            high = middle
        except (OSError, MemoryError):
            low = middle
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    return high


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _check_in_child(
    connection: socket.socket, tokenizer: LLTokenizer, job: dict[str, Any], used_bytes: int
) -> dict[str, Any]:
    """Check a grammar in a forked child. Wait until it sends a result or ends, its time is over, or the engine ends."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reader)
        os.close(connection.fileno())
        _run_child(tokenizer, job, used_bytes, writer)
    os.close(writer)
    try:
        sources: list[Any] = [reader, connection]
        ready, _, _ = select.select(sources, [], [], job["wall_s"])
        if reader not in ready:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if connection in ready and reader not in ready:
            # The engine has ended.
            sys.exit(0)
        if not ready:
            return {"outcome": "late"}
        result = b""
        while part := os.read(reader, 1 << 16):
            result += part
    finally:
        os.close(reader)
    return json.loads(result) if result else _outcome_of(status)


def _outcome_of(status: int) -> dict[str, Any]:
    """The outcome of a child that ended without a result, from its exit status."""
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if number in (signal.SIGPROF, signal.SIGXCPU):
        return {"outcome": "slow"}
    if number == signal.SIGALRM:
        return {"outcome": "late"}
    if number == signal.SIGABRT:
        # Rust aborts when an allocation fails.
        return {"outcome": "large"}
    return {"outcome": "crash", "message": f"signal {number}" if number else f"status {status}"}


def _run_child(tokenizer: LLTokenizer, job: dict[str, Any], used_bytes: int, writer: int) -> None:
    """Check one grammar within limits, write the result, and exit."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        # Rust prints a message when an allocation fails.
        os.dup2(null, 2)
        _limit(job["cpu_s"], job["wall_s"], used_bytes + (MAX_MEMORY_MIB << 20))
        result = _check(tokenizer, job)
    except MemoryError:
        result = {"outcome": "large"}
    except BaseException as error:
        # No exception may reach the frames above: the child would continue as a second copy of `main`.
        result = {"outcome": "crash", "message": message_of(f"{type(error).__name__}: {error}")}
    os.write(writer, json.dumps(result).encode())
    os._exit(0)


def _limit(cpu_s: float, wall_s: float, memory_bytes: int) -> None:
    """Limit this process. The default action of each signal kills it, also while Rust code runs."""
    for name, value in (
        ("RLIMIT_CORE", 0),
        ("RLIMIT_CPU", int(cpu_s) + 2),
        ("RLIMIT_STACK", _STACK_BYTES),
        ("RLIMIT_AS", memory_bytes),
    ):
        which = getattr(resource, name)
        _, hard = resource.getrlimit(which)
        if hard == resource.RLIM_INFINITY or value <= hard:
            resource.setrlimit(which, (value, hard))
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    # The parent process enforces the wall-clock limit. This timer ends the child if the parent has died.
    signal.setitimer(signal.ITIMER_REAL, wall_s + 1)


def _check(tokenizer: LLTokenizer, job: dict[str, Any]) -> dict[str, Any]:
    try:
        source = to_source(job["kind"], job["text"], job["json_white_space"])
    except ValueError as error:
        return {"outcome": "invalid", "message": message_of(str(error))}
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits(for_check=True))
    if matcher.is_error():
        return {"outcome": "invalid", "message": message_of(matcher.get_error())}
    until_s = time.process_time() + _WALKS_CPU_S
    for seed in range(_NUM_WALKS):
        walker = matcher.deep_copy()
        _walk(walker, random.Random(seed), until_s)
        if walker.is_error():
            return {"outcome": "invalid", "message": message_of(walker.get_error())}
    return {"outcome": "good"}


def _walk(matcher: LLMatcher, rng: random.Random, until_s: float) -> None:
    """Compute masks along a random sequence of allowed tokens."""
    for _ in range(_WALK_LEN):
        mask = matcher.compute_bitmask()
        if matcher.is_error() or not any(mask):
            return
        matcher.consume_token(_random_id(mask, rng))
        if matcher.is_stopped() or time.process_time() > until_s:
            return


def _random_id(mask: bytes, rng: random.Random) -> int:
    """A random token id that the mask allows, taken from the first non-zero byte at or after a random position."""
    start = rng.randrange(len(mask))
    turned = mask[start:] + mask[:start]
    skipped = len(turned) - len(turned.lstrip(b"\0"))
    bits = turned[skipped]
    bit = rng.choice([i for i in range(8) if bits >> i & 1])
    return (start + skipped) % len(mask) * 8 + bit
