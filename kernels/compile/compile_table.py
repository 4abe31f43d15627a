"""Offline compilation of every kernel in every configuration, without a GPU, against a committed table.

    python -m quire.kernels.compile.compile_table --check tests/kernels/compile_table.json     # all of it, minutes
    python -m quire.kernels.compile.compile_table --check ... --match 'sm_90/.*/128'           # a part
    python -m quire.kernels.compile.compile_table --write tests/kernels/compile_table.json  # after a change on purpose

What is compiled is listed in `compile_attention` and `compile_entries`, how in `offline_compile`. The table is kept
per minor version of Triton, since the compiler's choices differ between them. `make kernels-table` checks all of it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import triton

from quire.kernels.compile import compile_attention, compile_entries
from quire.kernels.compile.offline_compile import Entry, Record, compile_entry


def entries() -> Iterator[Entry]:
    """Everything that the table lists."""
    yield from compile_attention.entries()
    yield from compile_entries.entries()


def triton_minor() -> str:
    """Key of the table: "3.9" for Triton 3.9.x."""
    return ".".join(triton.__version__.split(".")[:2])


def compare(name: str, expected: dict[str, Any] | None, record: Record) -> list[str]:
    """Problems of a record, and where it departs from the committed table.

    `ptxas` and LLVM move a few registers from one build to the next: 16 are tolerated, shared memory is not.
    """
    found = [f"{name}: {problem}" for problem in record.problems]
    if expected is None:
        return found  # this minor version of Triton has no table: the limits above still hold
    if abs(record.registers - expected["registers"]) > 16:
        found.append(
            f"{name}: {record.registers} registers, the table says {expected['registers']}"
        )
    for key in ("shared_bytes", "matrix", "layout"):
        if getattr(record, key) != expected[key]:
            found.append(f"{name}: {key} {getattr(record, key)}, the table says {expected[key]}")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", type=Path, metavar="TABLE", help="replace this Triton's entries")
    action.add_argument("--check", type=Path, metavar="TABLE", help="compare with the table")
    parser.add_argument("--match", default="", help="regular expression on the entries' names")
    options = parser.parse_args(arguments)
    path = options.write or options.check
    table = json.loads(path.read_text()) if path.exists() else {}
    known = table.get(triton_minor(), {})
    problems, records = [], {}
    for entry in entries():
        if not re.search(options.match, entry.name):
            continue
        record = compile_entry(entry)
        records[entry.name] = {k: v for k, v in asdict(record).items() if k != "problems"}
        print(entry.name, *(f"{k}={v}" for k, v in records[entry.name].items()), flush=True)
        expected = known.get(entry.name) if options.check else None
        if options.check and known and expected is None:
            problems.append(f"{entry.name}: not in the table")
        problems += compare(entry.name, expected, record)
    if options.write:
        kept = {
            name: record for name, record in known.items() if options.match and name not in records
        }
        table[triton_minor()] = dict(sorted({**kept, **records}.items()))
        lines = (
            f'"{minor}": {{\n'
            + ",\n".join(f'  "{name}": {json.dumps(record)}' for name, record in rows.items())
            + "\n}"
            for minor, rows in sorted(table.items())
        )
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(*problems, sep="\n", file=sys.stderr)
    print(f"{len(records)} compiled, {len(problems)} problems", flush=True)
    return 1 if problems or not records else 0


if __name__ == "__main__":
    sys.exit(main())
