"""An error of a copy names the node that has failed. `tests/system/test_checkpoint_nodes.py` has real nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.replica.builtin_model import CHECKPOINT
from quire.replica.checkpoint.checkpoint import DownloadError
from quire.replica.checkpoint.checkpoint_copy import list_checkpoint, read_piece

# A machine that only tests the GPU's path has no Ray, and still collects this module.
ray = pytest.importorskip("ray", exc_type=ModuleNotFoundError)
node_checkpoints = pytest.importorskip("quire.replica.serving.node_checkpoints")

MODEL, NODE = "/models/harbour", "ab" * 28


@pytest.fixture(autouse=True)
def other(monkeypatch: pytest.MonkeyPatch) -> None:
    listing = list_checkpoint(str(CHECKPOINT), None, True)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(node_checkpoints, "_find", lambda *_: (NODE, listing))


@pytest.mark.parametrize(
    "error",
    [
        ray.exceptions.GetTimeoutError("no answer"),
        ray.exceptions.RayTaskError(
            "read_piece", "trace", OSError("it has changed")
        ).as_instanceof_cause(),
        ray.exceptions.RayError("the node has died"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_fails_there_names_the_other_node(tmp_path: Path, monkeypatch, error: Exception):
    def fails(*_: object):
        raise error
        yield

    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    monkeypatch.setattr(node_checkpoints, "_read", fails)
    with pytest.raises(DownloadError, match=f"node {NODE} has it and failed"):
        node_checkpoints.bring_checkpoint(MODEL, None)


def test_what_fails_here_does_not(tmp_path: Path, monkeypatch):
    def read(node, folder, pieces):
        return (read_piece(folder, piece) for piece in pieces)

    (tmp_path / "file").touch()
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(node_checkpoints, "_read", read)
    with pytest.raises(DownloadError, match=r"cannot be written to this node: .*Not a directory"):
        node_checkpoints.bring_checkpoint(MODEL, None)
