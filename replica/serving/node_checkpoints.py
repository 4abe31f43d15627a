"""Brings a model to a node that lacks it, from another node of the Ray cluster.

Ray tasks on the other node list the files and read them in pieces, and Ray's object store moves the pieces. So nothing
listens on a port, and no replica is held up: a task runs in a process of its own.
"""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Iterator, Sequence

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from quire.replica.checkpoint.checkpoint import DownloadError, NotHereError, own_checkpoint
from quire.replica.checkpoint.checkpoint_copy import (
    Listing,
    Piece,
    PieceBytes,
    copy_checkpoint,
    list_checkpoint,
    read_piece,
)
from quire.replica.config import EngineArgs

logger = logging.getLogger("ray.serve")
# Nodes that are asked whether they have a model, and the longest wait for their answers.
_MAX_ASKED = 64
_ASK_S = 30.0
# A piece that takes longer has failed.
_PIECE_S = 60.0
# Pieces on their way. Each takes its bytes in the object stores of both nodes.
_NUM_AHEAD = 3


def bring_models(args: EngineArgs) -> None:
    """Call `bring_checkpoint` for the model of an engine, and for its draft model."""
    bring_checkpoint(args.model, args.revision)
    if args.speculation.draft_model is not None:
        bring_checkpoint(args.speculation.draft_model, None)


def bring_checkpoint(model: str, revision: str | None, *, weights: bool = True) -> None:
    """Copy a model that this node lacks, and cannot download, from a node that has it.

    Does nothing if this node has the model, or if no other node has it: then `resolve_checkpoint` says what is missing,
    or finds an earlier copy.

    Parameters
    ----------
    model, revision, weights
        As of `resolve_checkpoint`.

    Raises
    ------
    DownloadError
        The other node, or this one's disk, failed meanwhile. Another attempt may succeed.
    CheckpointError
        See `copy_checkpoint`.
    """
    try:
        own_checkpoint(model, revision, weights=weights)
        return
    except NotHereError:
        if not ray.is_initialized():
            return
    found = _find(model, revision, weights)
    if found is None:
        return
    node, listing = found
    began_s = time.monotonic()
    try:
        is_new = copy_checkpoint(
            model,
            revision,
            listing,
            lambda pieces: _read(node, listing.folder, pieces),
            weights=weights,
        )
    except RayError as error:  # also what a task there raises
        raise DownloadError(f"model {model!r}: node {node} has it and failed: {error}") from error
    except OSError as error:
        raise DownloadError(f"model {model!r} cannot be written to this node: {error}") from error
    if is_new:
        seconds = time.monotonic() - began_s
        logger.info(
            "copied %s of node %s, %.2f GB in %.1f s, %.2f GB/s",
            *(listing.folder, node, listing.num_bytes / 1e9),
            *(seconds, listing.num_bytes / 1e9 / max(seconds, 1e-9)),
        )


def _find(model: str, revision: str | None, weights: bool) -> tuple[str, Listing] | None:
    """The first node that says that it has a model, and what it has."""
    own = ray.get_runtime_context().get_node_id()
    others = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != own]
    asked = random.sample(others, min(_MAX_ASKED, len(others)))
    listings = {_on(node, list_checkpoint).remote(model, revision, weights): node for node in asked}
    end_s, waiting, num_without = time.monotonic() + _ASK_S, list(listings), 0
    try:
        while waiting:
            answered, waiting = ray.wait(waiting, timeout=max(0.0, end_s - time.monotonic()))
            if not answered:
                break
            listing = _answer(answered[0])
            if listing is not None:
                return listings[answered[0]], listing
            num_without += 1
    finally:
        for ref in waiting:
            ray.cancel(ref)
    logger.info("model %r is on none of the %d other nodes that answered", model, num_without)
    return None


def _answer(ref: ray.ObjectRef) -> Listing | None:
    try:
        return ray.get(ref)
    except RayError:  # The node has ended.
        return None


def _read(node: str, folder: str, pieces: Sequence[Piece]) -> Iterator[PieceBytes]:
    """Yield the bytes of pieces that tasks on another node read."""
    read = _on(node, read_piece)
    ahead: deque[ray.ObjectRef] = deque()
    left = iter(pieces)
    for _ in pieces:
        while len(ahead) < _NUM_AHEAD and (piece := next(left, None)) is not None:
            ahead.append(read.remote(folder, piece))
        yield ray.get(ahead.popleft(), timeout=_PIECE_S)


def _on(node: str, function: object) -> ray.remote_function.RemoteFunction:
    affinity = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=affinity)
