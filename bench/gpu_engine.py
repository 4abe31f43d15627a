"""The engine on a GPU: the right tokens, and how near its steps are to the machine's roof. Parts of four minutes.

    python -m quire.bench gpu-engine                         # or: make gpu-engine
    python -m quire.bench gpu-engine --parts decode          # one part; the others' rows are kept with --resume
    python -m quire.bench gpu-engine --resume                # what an earlier run on this commit and GPU left open
    python -m quire.bench gpu-engine --rehearse              # no GPU: every part, a tiny model on the CPU

Weights are random, in the shapes of `checkpoints.py`; the checkpoints are kept in --checkpoints. The result is
written after every part, so a run that is stopped leaves what it has.

A rehearsal proves that the command runs. It measures nothing: its bars have no value and hold neither way.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from quire.bench import report
from quire.bench.gpu_kernels import Results, open_session, run

COMMAND = "python -m quire.bench gpu-engine"
METHOD = "wall time of whole batches, differences of two lengths; gaps between steps by the device's events"
RESULT = report.RESULTS / "gpu_engine.json"
PART_BUDGET_S = 240


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status: 1 where a part raises."""
    parser = argparse.ArgumentParser(
        prog=COMMAND, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rehearse", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--resume", action="store_true", help="keep what the result file has")
    parser.add_argument("--parts", nargs="+", help="only these")
    parser.add_argument("--checkpoints", type=Path, default=Path("bench-checkpoints"))
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    from quire.bench import gpu_engine_parts, gpu_machine

    parts = [gpu_machine.MACHINE, *gpu_engine_parts.parts(options.checkpoints)]
    names = [part.name for part in parts]
    try:
        session = open_session(options.rehearse, PART_BUDGET_S * len(parts))
        unknown = set(options.parts or ()) - set(names)
        if unknown:
            raise ValueError(
                f"--parts: must be of {', '.join(names)}, got {', '.join(sorted(unknown))}"
            )
        results = Results(options.out, options.rehearse, COMMAND, METHOD)
        results.check_overwrite()
        if options.resume:
            results.load()
    except (RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    errors = run(session, results, parts, set(options.parts or names))
    print(*errors, sep="\n", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
