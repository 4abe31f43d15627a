"""The cluster whose processes are killed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `chaos_clients`
sys.path.insert(0, str(Path(__file__).parents[1] / "system"))  # for `live`

from live import Cluster, start_cluster


@pytest.fixture(scope="module")
def chaos_cluster(tmp_path_factory) -> Iterator[Cluster]:
    """Three replicas and two routers."""

    def change(config: dict) -> None:
        args = config["applications"][0]["args"]
        args |= {"replicas": 3, "routers": 2, "engine": {"deterministic": True}}
        # All replicas may be dead until the first is back: on two cores, with three of them starting, that
        # is more than the 30 s of the default.
        args["router"] = {"max_move_s": 120.0}

    yield from start_cluster(tmp_path_factory.mktemp("chaos"), change)
