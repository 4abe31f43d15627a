"""One cluster for all system tests, and what must hold after each of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.protos import generation_pb2_grpc

sys.path.insert(0, str(Path(__file__).parent))  # for `live`
sys.path.append(str(Path(__file__).parents[1] / "router"))  # for `hostile_inputs`
sys.path.append(str(Path(__file__).parents[1] / "chaos"))  # for `memory`
sys.path.append(str(Path(__file__).parents[1] / "cluster"))  # for `authority`

from live import Cluster, start_cluster, wait_until

from tests.otlp_receiver import GrpcReceiver


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put this folder's tests on the session's cluster last.

    That cluster runs until the session ends, and even an idle one takes processor time.
    """
    here = Path(__file__).parent
    items.sort(key=lambda i: i.path.parent == here and "cluster" in getattr(i, "fixturenames", ()))


@pytest.fixture(scope="session")
def adapter_folder(tmp_path_factory) -> Path:
    """The folder from which the cluster loads adapters at run time."""
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="session")
def collector() -> Iterator[GrpcReceiver]:
    """Receives the traces of requests whose client asks for one."""
    with GrpcReceiver() as receiver:
        yield receiver


@pytest.fixture(scope="session")
def cluster(tmp_path_factory, collector: GrpcReceiver, adapter_folder: Path) -> Iterator[Cluster]:
    """HAProxy mode, two routers, two replicas of the embedded model, float32, deterministic."""
    folder = tmp_path_factory.mktemp("cluster")

    def change(config: dict) -> None:
        (application,) = config["applications"]
        application["args"]["router"] = {"decision_log_folder": str(folder / "decisions")}
        application["args"]["metrics"] = {"vllm_names": True}
        application["args"]["adapter_folder"] = str(adapter_folder)
        application["args"].setdefault("engine", {})["max_loaded_adapters"] = 2
        application["args"]["tracing"] = {"endpoint": collector.endpoint, "sample_ratio": 0.0}

    yield from start_cluster(folder, change)


@pytest.fixture
def generation(cluster: Cluster) -> Iterator[generation_pb2_grpc.GenerationStub]:
    with cluster.channel() as channel:
        yield generation_pb2_grpc.GenerationStub(channel)


@pytest.fixture(autouse=True)
def conserved(request) -> Iterator[None]:
    """After every test on the cluster: nothing runs, and free + cached = total on every replica."""
    yield
    if "cluster" not in request.fixturenames:
        return
    cluster = request.getfixturevalue("cluster")

    def at_rest() -> bool:
        return all(
            load.num_running == 0
            and load.num_waiting == 0
            and device.blocks_free + device.blocks_cached == device.blocks_total
            for load in cluster.loads()
            for device in load.cache.tiers
        )

    wait_until(at_rest, 5, f"free + cached = total: {cluster.loads()}")
