"""Part of the engine's GPU benchmark: from a new process to the first token of a checkpoint on the disk.

    python -m tests.perf.gpu.engine.gpu_engine_start CHECKPOINT --device cuda --dtype bfloat16   # the measured process

The clock starts before the process, so it covers the interpreter, the imports of torch and transformers, the weights,
the graphs, the cache and the first prompt. Each point starts the process twice and reports the second start. The first
start compiles the Triton kernels into Triton's cache on the disk, where a machine that has served before has them.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from quire.cluster.bench.results import report
from tests.perf.gpu.gpu_session import OutOfRoom, Part, Point, Row, Session, significant, worst

MAX_HELD = 0.1  # cached share of files that count as dropped
TIMEOUT_S = {"cuda": 100.0, "cpu": 1200.0}  # the machine of a rehearsal may be busy
PROMPT = tuple(range(3, 19))


@dataclass(frozen=True, slots=True)
class Start:
    """Times of one process."""

    seconds: float  # to the first token
    phases_s: dict[str, float]  # in the order of the phases


def parts(folder: Path) -> list[Part]:
    """The parts: write the checkpoints to this folder, then start with one."""
    return [
        Part("checkpoints", checkpoint_points, partial(write_checkpoint, folder), budget_s=200),
        Part("start", start_points, partial(measure_start, folder), start_bars, budget_s=160),
    ]


def checkpoint_points(rehearsal: bool) -> list[Point]:
    """All models, written before the measurements."""
    from tests.perf.gpu.engine.gpu_models import NAMES

    return [{"model": name} for name in NAMES]


def write_checkpoint(folder: Path, session: Session, point: Point) -> Row:
    """Write a checkpoint with random weights, unless it exists."""
    from tests.perf.gpu.engine.gpu_models import checkpoint, num_bytes

    began_s = session.clock()
    path = checkpoint(folder, point["model"], session).path
    seconds = session.clock() - began_s
    size = num_bytes(path)
    return {
        "gb": significant(size / 1e9),
        "files": len(list(path.glob("*.safetensors"))),
        "seconds": significant(seconds),
    }


def start_points(rehearsal: bool) -> list[Point]:
    """The points: with the files in the page cache and, where possible, after dropping them from it."""
    from tests.perf.gpu.engine.gpu_models import LARGE, SMALL

    model = SMALL if rehearsal else LARGE[1]
    return [{"model": model, "files": files} for files in ("cached", "dropped")]


def measure_start(folder: Path, session: Session, point: Point) -> Row:
    """Measure the second start, in total and by phase, and the first start's total."""
    from tests.perf.gpu.engine.gpu_models import checkpoint, num_bytes

    model = checkpoint(folder, point["model"], session)
    starts = []
    for _ in range(2):
        if point["files"] == "dropped":
            drop_from_page_cache(model.path)
            held = cached_fraction(model.path)
            if held > MAX_HELD:
                raise OutOfRoom(f"files: {held:.0%} of them stay in memory, as on a tmpfs")
        starts.append(start(model.path, session.device.type, model.dtype))
    first, second = starts
    load_s = second.phases_s["load"]
    return {
        "seconds": significant(second.seconds),
        **{f"{name}_s": significant(s) for name, s in second.phases_s.items()},
        "load_gb_per_s": significant(num_bytes(model.path) / load_s / 1e9),
        "first_seconds": significant(first.seconds),
    }


def start(path: Path, device: str, dtype: str) -> Start:
    """Start a process and wait for its first token.

    Raises
    ------
    RuntimeError
        The process ended without a token; the message has the end of its output.
    TimeoutError
        The process takes too long.
    """
    command = ["env", f"PYTHONPATH={os.pathsep.join(filter(None, sys.path))}"]
    command += [sys.executable, "-m", "tests.perf.gpu.engine.gpu_engine_start", str(path)]
    command += ["--device", device, "--dtype", dtype]
    began_s = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        printed, errors = process.communicate(timeout=TIMEOUT_S[device])
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise TimeoutError(f"no first token after {TIMEOUT_S[device]:g} s") from None
    lines = [line for line in printed.splitlines() if line.startswith("{")]
    if process.returncode or not lines:
        raise RuntimeError(f"status {process.returncode}: {errors[-300:]}")
    told: dict[str, Any] = json.loads(lines[0])
    phases = told["phases_s"]
    # Both processes read the machine's monotonic clock.
    seconds = told["first_token_at_s"] - began_s
    interpreter_s = told["began_at_s"] - began_s
    return Start(seconds, {"interpreter": interpreter_s, **phases})


def child(path: str, device: str, dtype: str) -> None:
    """The measured process: prints a JSON line at its first token."""
    began_s = time.perf_counter()
    from quire.protos.sampling_params import SamplingParams
    from quire.replica.engine import Engine

    modules_s = time.perf_counter() - began_s
    with Engine(model=path, device=device, dtype=dtype, max_model_len=8192) as engine:
        made_s = time.perf_counter()
        engine.generate([PROMPT], SamplingParams(max_tokens=1, temperature=0.0), progress=False)
        first_s = time.perf_counter()
        phases = {"modules": modules_s, **engine.startup_s, "first_prompt": first_s - made_s}
        told = {"began_at_s": began_s, "first_token_at_s": first_s, "phases_s": phases}
        print(json.dumps(told), flush=True)


def drop_from_page_cache(path: Path) -> None:
    """Write a folder's files back and drop them from the page cache, so that the next reader reads the disk."""
    for file in path.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def cached_fraction(path: Path) -> float:
    """Share of a folder's files that is in the page cache; on a tmpfs always all of it."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    held = pages = 0
    for file in path.iterdir():
        num_bytes = file.stat().st_size
        if not num_bytes:
            continue
        with file.open("rb") as opened:
            # ctypes gives only the address of writable memory, which a private mapping is.
            view = mmap.mmap(opened.fileno(), num_bytes, access=mmap.ACCESS_COPY)
        states = (ctypes.c_ubyte * -(-num_bytes // mmap.PAGESIZE))()
        first = ctypes.c_char.from_buffer(view)
        failed = libc.mincore(ctypes.addressof(first), num_bytes, states)
        del first  # before the mapping is closed
        view.close()
        if failed:
            raise OSError(ctypes.get_errno(), "mincore", str(file))
        held += sum(state & 1 for state in bytes(states))
        pages += len(states)
    return held / max(pages, 1)


def start_bars(rows: list[Row]) -> list[report.Bar]:
    return [worst("gpu/engine/start_to_first_token_s", rows, "seconds", "s", 25, at_most=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    child(options.checkpoint, options.device, options.dtype)


if __name__ == "__main__":
    main()
