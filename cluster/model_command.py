"""`quire model`: proves that Quire computes what transformers computes for a checkpoint, and downloads checkpoints."""

from __future__ import annotations

import argparse
import functools
import re
import time


def add_model(commands: argparse._SubParsersAction) -> None:
    """Add the command to the parser of `quire`."""
    parser = commands.add_parser(
        "model", help="check whether a model can be served, or download one"
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    check = actions.add_parser(
        "check",
        help="compare a tiny model of a checkpoint's class with transformers",
        description="Reads the configuration of MODEL, makes a tiny model of its class with random weights, and "
        "compares the log-probabilities of Quire's engine with transformers'. Weights are neither read nor "
        "downloaded. A replica does the same before it serves a model. Exit status: 0 if the model is served, else 1.",
    )
    check.add_argument(
        "model", metavar="MODEL", help="'embedded', a checkpoint folder or a Hugging Face id"
    )
    check.add_argument("--revision", help="branch, tag or commit of a Hugging Face id")
    check.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where it will be served (default: %(default)s)",
    )
    check.set_defaults(run=_check)
    fetch = actions.add_parser(
        "fetch",
        help="download a checkpoint and check its digest",
        description="Downloads the files of MODEL that Quire reads into the hub's cache (HF_HOME), and prints their "
        "folder and their digest: SHA-256 over the sorted lines that sha256sum prints for them. With --digest, files "
        "that are there already need no network. Exit status: 0, or 1 if there is no such model or its files differ.",
    )
    fetch.add_argument("model", metavar="MODEL", help="a Hugging Face id, or a checkpoint folder")
    fetch.add_argument("--revision", help="branch, tag or commit; a commit is always the same")
    fetch.add_argument("--digest", help="refuse other files; 'sha256:' and 64 hexadecimal digits")
    fetch.set_defaults(run=_fetch)


def _fetch(arguments: argparse.Namespace) -> int:
    from quire.replica.checkpoint.checkpoint import fetch_checkpoint
    from quire.replica.checkpoint.model_spec import CheckpointError

    if arguments.digest and not re.fullmatch(r"sha256:[0-9a-f]{64}", arguments.digest):
        print(f"--digest: must be 'sha256:' and 64 hexadecimal digits, got {arguments.digest!r}")
        return 1
    try:
        folder, digest = fetch_checkpoint(arguments.model, arguments.revision, arguments.digest)
    except CheckpointError as error:
        print(error)
        return 1
    print(f"{folder}\n{digest}")
    return 0


def _check(arguments: argparse.Namespace) -> int:
    # Imports torch and transformers, which takes seconds.
    from quire.replica.checkpoint.checkpoint import resolve_checkpoint
    from quire.replica.checkpoint.model_spec import CheckpointError, ModelSpec
    from quire.replica.engine import Engine
    from quire.replica.proof.verdicts import check_model

    try:
        folder = resolve_checkpoint(arguments.model, arguments.revision, weights=False)
        spec = ModelSpec.from_checkpoint(folder)
        began = time.perf_counter()
        check_model(spec, arguments.device, functools.partial(Engine, prove=False))
    except CheckpointError as error:
        print(error)
        return 1
    seconds = time.perf_counter() - began
    print(
        f"{spec.architecture}: served on {arguments.device} ({spec.num_layers} layers, {seconds:.1f} s)"
    )
    return 0
