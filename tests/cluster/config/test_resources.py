"""What an application reserves against what the nodes have."""

from __future__ import annotations

from typing import Any

import pytest

from quire.cluster.config.app_config import AppConfig
from quire.cluster.config.resources import device_of, lacking, reservations

GIB = 1024**3
CPU_NODE = {"CPU": 2.0, "memory": 8.0 * GIB}
GPU_NODE = {"CPU": 8.0, "GPU": 1.0, "memory": 64.0 * GIB}


def lack_of(args: dict[str, Any], *nodes: dict[str, float]) -> str | None:
    config = AppConfig.from_args(args)
    return lacking(reservations(config, device_of(config, nodes)), nodes)


@pytest.mark.parametrize(
    ("args", "nodes"),
    [
        ({}, [CPU_NODE]),
        ({"device": "cuda"}, [CPU_NODE, GPU_NODE, GPU_NODE]),
        ({"device": "cuda", "replica_resources": {"num_gpus": 0.5}}, [GPU_NODE]),
        ({"replicas": 16, "device": "cpu", "router_resources": {"num_cpus": 0}}, [CPU_NODE] * 2),
    ],
)
def test_what_fits_lacks_nothing(args: dict[str, Any], nodes: list[dict[str, float]]):
    assert lack_of(args, *nodes) is None


@pytest.mark.parametrize(
    ("args", "nodes", "said"),
    [
        ({"device": "cuda"}, [CPU_NODE], "a replica needs 1 GPU, and no node has more than 0"),
        (
            {
                "device": "cpu",
                "engine": {"tensor_parallel": 4},
                "replica_resources": {"num_cpus": 1.0},
            },
            [CPU_NODE] * 4,
            "a replica needs 4 CPU, and no node has more than 2",
        ),
        ({"device": "cuda"}, [], "a replica needs 0.25 CPU, and no node has more than 0"),
        ({"replicas": 2}, [GPU_NODE], "2 replicas need 2 GPU, and all nodes have 1"),
        (
            {"replicas": 1, "router_resources": {"memory_gib": 4.5}},
            [CPU_NODE],
            "2 routers need 9 GiB of memory, and all nodes have 8",
        ),
        (
            {"replicas": 9, "routers": 1},
            [CPU_NODE],
            "9 replicas and 1 router need 2.35 CPU, and all nodes have 2",
        ),
        (
            {"replica_resources": {"num_cpus": 3}},
            [CPU_NODE, CPU_NODE],
            "a replica needs 3 CPU, and no node has more than 2",
        ),
    ],
)
def test_the_first_lack_is_named(args: dict[str, Any], nodes: list[dict[str, float]], said: str):
    assert lack_of(args, *nodes) == said


def test_auto_takes_a_gpu_where_a_node_has_one():
    assert device_of(AppConfig(), [CPU_NODE]) == "cpu"
    assert device_of(AppConfig(), [CPU_NODE, GPU_NODE]) == "cuda"
    assert device_of(AppConfig(device="cpu"), [GPU_NODE]) == "cpu"
