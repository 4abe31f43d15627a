"""The cluster whose processes are killed and replaced."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `chaos_clients`
sys.path.insert(0, str(Path(__file__).parents[1] / "system"))  # for `live`
sys.path.append(str(Path(__file__).parents[1] / "cluster"))  # for `authority`

from live import Cluster, start_cluster


@pytest.fixture(scope="session")
def chaos_cluster(tmp_path_factory) -> Iterator[Cluster]:
    """Three replicas and two routers."""

    def change(config: dict) -> None:
        application = config["applications"][0]
        args = application["args"]
        # Drafts of every request and of earlier answers: several tokens of a stream are lost, and found again, at once.
        engine = {"deterministic": True, "speculation": {"method": "suffix", "max_draft_tokens": 4}}
        args |= {"replicas": 3, "routers": 2, "engine": engine}
        args["router"] = {
            # All replicas may be dead until the first is back: on two cores, with three of them starting, that
            # is more than the 30 s of the default.
            "max_move_s": 120.0,
            # A replica that goes away lets go of its streams before they can end: they have to move.
            "drain_timeout_s": 0.0,
        }
        # A router's streams cannot move, so they have the time that a move may take.
        application["deployments"] = [{"name": "Router", "graceful_shutdown_timeout_s": 120.0}]
        # Serve holds a router for so long before it stops listening, 30 s by default. HAProxy's old process still sends
        # it the request that follows a stream on the same connection, so this is longer than any stream here.
        env = config["controller_options"]["runtime_env"]["env_vars"]
        env["RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"] = "20"

    yield from start_cluster(tmp_path_factory.mktemp("chaos"), change)
