"""Offline compilation of every kernel in every configuration, without a GPU, against a committed table.

    python -m tests.kernels.compile.compile_table --check tests/kernels/compile_table.json     # everything: minutes
    python -m tests.kernels.compile.compile_table --check ... --match 'sm_90/.*/128'           # some entries
    python -m tests.kernels.compile.compile_table --write tests/kernels/compile_table.json     # after a change

`compile_attention` and `compile_entries` list the entries; `offline_compile` compiles them. The table has a section for
each minor version of Triton, because the compiler's choices differ between them. `make kernels-table` checks all
entries.
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

from tests.kernels.compile import compile_attention, compile_entries
from tests.kernels.compile.offline_compile import Entry, Record, compile_entry


def entries() -> Iterator[Entry]:
    """Yield all entries of the table."""
    yield from compile_attention.entries()
    yield from compile_entries.entries()


def triton_minor() -> str:
    """Key of the table's section for the installed Triton, such as "3.9" for 3.9.x."""
    return ".".join(triton.__version__.split(".")[:2])


def compare(name: str, expected: dict[str, Any] | None, record: Record) -> list[str]:
    """Return a record's problems and its differences from the committed table.

    Builds of `ptxas` and LLVM differ by a few registers, so 16 are tolerated. Shared memory must be equal.
    """
    found = [f"{name}: {problem}" for problem in record.problems]
    if expected is None:
        # This minor version of Triton has no section: only the limits are checked.
        return found
    if abs(record.registers - expected["registers"]) > 16:
        found.append(
            f"{name}: {record.registers} registers, the table says {expected['registers']}"
        )
    for key in ("shared_bytes", "matrix", "layout"):
        if getattr(record, key) != expected[key]:
            found.append(f"{name}: {key} {getattr(record, key)}, the table says {expected[key]}")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
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
