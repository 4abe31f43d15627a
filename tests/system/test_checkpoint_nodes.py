"""A node that lacks a model gets it from another node: real Ray, two nodes with homes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoint_nodes import COMMITS

from quire.replica.builtin_model import CHECKPOINT
from quire.replica.checkpoint.checkpoint_copy import copy_digest

pytestmark = pytest.mark.system
SCRIPT = Path(__file__).with_name("checkpoint_nodes.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    environment = {name: text for name, text in os.environ.items() if name != "QUIRE_CACHE"}
    result = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path_factory.mktemp("homes"))],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment | {"HF_HUB_OFFLINE": "1"},
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_a_replica_gets_the_whole_model_and_a_router_no_weights(found):
    replica, router = found["replica"], found["router"]
    assert replica["is_own"] and replica["weight_files"] == ["model.safetensors"]
    assert replica["digest"] == copy_digest(CHECKPOINT, weights=True)
    # So it shares cached prefixes with the replicas of the other node.
    assert replica["revision"] == COMMITS[0]
    assert router["is_own"] and router["weight_files"] == []
    assert router["digest"] == copy_digest(CHECKPOINT, weights=False)


def test_another_revision_of_the_other_node_replaces_the_copy(found):
    assert found["changed"]["revision"] == found["beside"]["revision"] == COMMITS[1]
    assert found["changed"]["is_own"] and found["beside"]["is_own"]


def test_the_copy_serves_when_the_other_node_has_ended(found):
    assert found["alone"]["revision"] == COMMITS[1]


def test_a_model_that_no_node_has_is_an_error_as_before(found):
    assert "model 'quire/unknown' could not be downloaded" in found["unknown"]["error"]
    assert "there is no folder /models/unknown on node" in found["no_folder"]["error"]
    assert found["no_folder"]["seconds"] < 30, "the nodes' answers are awaited, not the time limit"
