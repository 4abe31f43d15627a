"""Every kernel on a GPU: right, and how near to the roof. One command, at most six minutes.

    python -m quire.bench gpu-kernels                        # or: make gpu-kernels
    python -m quire.bench gpu-kernels --resume               # what an earlier run on this commit and GPU left open
    python -m quire.bench gpu-kernels --parts decode prefill
    python -m quire.bench gpu-kernels --rehearse             # no GPU: every part, tiny shapes, the interpreter

First the tests of the kernels run natively. Then each part measures one kernel beside the machine's own copy bandwidth
and matrix product, and attention beside torch's SDPA (flash and cuDNN), FlashInfer and FlashAttention where they are
installed. The result is written after every part, so a run that is stopped leaves what it has; shapes that do not
fit the device's memory, or for which no time is left, are listed as skipped.

A rehearsal proves that the command runs. It measures nothing: its bars have no value and hold neither way.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.bench import report

if TYPE_CHECKING:
    from quire.bench.gpu_session import Part, Row, Session

BUDGET_S = 350  # of the six minutes; the rest is for imports and the last write
COMMAND = "python -m quire.bench gpu-kernels"
METHOD = "medians of CUDA graph replays between events, L2 cold, candidates in turns"
RESULT = report.RESULTS / "gpu_kernels.json"


def all_parts() -> list[Part]:
    """In the order in which they run. Imports the kernels, so TRITON_INTERPRET must be decided before."""
    from quire.bench import gpu_attention, gpu_machine, gpu_rows, gpu_step

    return [
        gpu_machine.NUMERICS,
        gpu_machine.MACHINE,
        *gpu_attention.PARTS,
        *gpu_rows.PARTS,
        *gpu_step.PARTS,
    ]


def open_session(rehearsal: bool, budget_s: float) -> Session:
    """A session on the GPU, or on the CPU with Triton's interpreter.

    Raises
    ------
    RuntimeError
        There is no GPU, and this is no rehearsal.
    """
    if rehearsal:
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    from quire.bench.gpu_session import Session

    if rehearsal:
        from quire.kernels.interpreter import repair_interpreter

        repair_interpreter()
    elif not torch.cuda.is_available():
        raise RuntimeError("device: torch finds no CUDA device; --rehearse needs none")
    torch.manual_seed(0)
    device = torch.device("cpu" if rehearsal else "cuda")
    return Session(device, rehearsal, time.monotonic() + budget_s)


class Results:
    """The rows of a run, part by part, and the file that they are kept in.

    Parameters
    ----------
    path
        Written after each part.
    rehearsal
        Whether the numbers mean nothing.
    command, method
        What the file says of how it came about.
    """

    def __init__(self, path: Path, rehearsal: bool, command: str = COMMAND, method: str = METHOD):
        self._command = command
        self._method = method
        self._path = path
        self._rehearsal = rehearsal
        self.rows: dict[str, list[Row]] = {}

    def load(self) -> None:
        """Take over the rows of an earlier run, if it was of the same commit on the same hardware.

        Raises
        ------
        ValueError
            It was not, with what differs.
        """
        if not self._path.exists():
            return
        found = json.loads(self._path.read_text())
        for key, now in (("commit", report.commit()), ("hardware", report.hardware())):
            if found[key] != now:
                raise ValueError(f"--resume: {self._path.name} is of {key} {found[key]}, not {now}")
        self.rows = {name: part["rows"] for name, part in found["parts"].items()}

    def check_overwrite(self) -> None:
        """Raise rather than let a rehearsal replace what was measured on a GPU."""
        if self._rehearsal and self._path.exists():
            if not json.loads(self._path.read_text()).get("rehearsal"):
                raise ValueError(
                    f"--rehearse: {self._path.name} holds measurements; give another file with --out"
                )

    def write(self, parts: list[Part], *, show: bool, **facts: Any) -> None:
        """Write all rows and the bars that follow from them."""
        bars = [bar for part in parts for bar in part.bars(self.rows.get(part.name, []))]
        rows = self.rows
        if self._rehearsal:
            bars = [replace(bar, value=None, details={}) for bar in bars]
            rows = {name: [] for name in rows}
        done = {
            name: {"points": len(self.rows[name]), "rows": found} for name, found in rows.items()
        }
        report.write(
            self._path,
            self._command + (" --rehearse" if self._rehearsal else ""),
            bars,
            show=show,
            method=self._method,
            rehearsal=self._rehearsal,
            **facts,
            parts=done,
        )


def run(session: Session, results: Results, parts: list[Part], chosen: set[str]) -> list[str]:
    """Run the chosen parts; returns the errors of their rows."""
    from quire.bench.gpu_peers import installed
    from quire.bench.gpu_session import is_final

    facts = _versions() | {"peers": ["torch SDPA", *installed()]}
    errors = []
    for part in parts:
        if part.name not in chosen and part.name != "machine":
            continue
        began_s = session.clock()
        points = part.points(session.rehearsal)
        kept = [row for row in results.rows.get(part.name, []) if is_final(row)]
        if part.name == "machine":
            kept = []  # the session needs its numbers
        open_points = [
            point for point in points if not any(point.items() <= r.items() for r in kept)
        ]
        new = list(part.run(session, open_points))
        results.rows[part.name] = kept + new
        errors += [f"{part.name}: {row['error']}" for row in new if "error" in row]
        results.write(parts, show=False, **facts)
        skipped = sum("skipped" in row for row in results.rows[part.name])
        print(
            f"{part.name:14}{len(new):5} measured{len(kept):5} kept{skipped:5} skipped"
            f"{session.clock() - began_s:8.1f} s",
            flush=True,
        )
    results.write(parts, show=True, **facts)
    return errors


def _versions() -> dict[str, str]:
    import torch
    import triton

    return {"torch": torch.__version__, "triton": triton.__version__}


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status: 1 for a test that fails or a kernel that raises."""
    parser = argparse.ArgumentParser(
        prog=COMMAND, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes in the interpreter")
    parser.add_argument("--resume", action="store_true", help="keep what the result file has")
    parser.add_argument("--parts", nargs="+", help="only these")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds for all parts")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    try:
        session = open_session(options.rehearse, options.budget_s)
        parts = all_parts()
        names = [part.name for part in parts]
        unknown = set(options.parts or ()) - set(names)
        if unknown:
            raise ValueError(
                f"--parts: must be of {', '.join(names)}, got {', '.join(sorted(unknown))}"
            )
        results = Results(options.out, options.rehearse)
        results.check_overwrite()
        if options.resume:
            results.load()
    except (RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    errors = run(session, results, parts, set(options.parts or names))
    failed = sum(row.get("failed", 0) for row in results.rows.get("numerics", []))
    print(*errors, sep="\n", file=sys.stderr)
    return 1 if errors or failed else 0


if __name__ == "__main__":
    sys.exit(main())
