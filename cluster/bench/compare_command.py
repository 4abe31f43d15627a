"""Run `quire bench compare`: from command-line options to `compare`, its table, JSON and plot."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path

from quire.cluster.bench.engines import compare
from quire.cluster.bench.engines.checkpoints import SHAPES, VOCAB_SIZE, build
from quire.cluster.bench.engines.engine_process import EngineSpec
from quire.cluster.bench.load.workloads import batches
from quire.cluster.bench.offline_command import shape_of
from quire.cluster.bench.results import plots, report


def main(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status: 1 if an engine failed."""
    from tqdm import tqdm

    workloads = list(batches(options.workloads))
    model = options.model
    if model in SHAPES and not Path(model).is_dir():
        model = str(build(model, Path(options.checkpoints) / model))
    specs = [
        EngineSpec.parse(text, model=model, dtype=options.dtype, threads=options.threads)
        for text in options.engines
    ]
    skip = frozenset(_pair(text) for text in options.skip)
    num_turns = options.repetitions * sum(
        (spec.name, workload.name) not in skip for spec in specs for workload in workloads
    )
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(open(options.log or os.devnull, "w"))
        show = sys.stderr.isatty() and not options.quiet
        bar = stack.enter_context(tqdm(total=num_turns, unit="turn", disable=not show))

        def told(what: compare.Turn | str) -> None:
            if isinstance(what, str):
                tqdm.write(what)
            else:
                bar.update()
                tqdm.write(f"{what.workload} {what.engine}: {what.seconds:.2f} s")

        found = compare.compare(
            specs,
            workloads,
            options.repetitions,
            _vocab_size(model),
            log,
            keep=options.out / "compare.jsonl",
            first_repetition=options.first_repetition,
            skip=skip,
            progress=told,
        )
    baseline = specs[0].name
    summary = compare.summarise(found, workloads, shape_of(Path(model), options.dtype), baseline)
    print(compare.table(summary, baseline))
    report.write(
        options.out / "compare.json",
        f"quire bench compare {Path(options.model).name} --engines {' '.join(found.settings)} "
        f"--workloads {' '.join(options.workloads)} --repetitions {options.repetitions}",
        [],
        model=Path(options.model).name,
        **summary,
    )
    if not options.no_plots:
        for sentence in plots.comparison(summary["rows"], options.out / "compare.png"):
            print(sentence)
    print(f"written to {options.out}")
    return 1 if found.failures else 0


def _pair(text: str) -> tuple[str, str]:
    engine, colon, workload = text.partition(":")
    if not colon:
        raise ValueError(f"skip: must be ENGINE:WORKLOAD, got {text!r}")
    return engine, workload


def _vocab_size(model: str) -> int:
    """Vocabulary size of a checkpoint folder. For a server's model name, the size of the random checkpoints is used."""
    from quire.replica.checkpoint.model_spec import read_json

    return int(read_json(Path(model) / "config.json", optional=True).get("vocab_size", VOCAB_SIZE))
