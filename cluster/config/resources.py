"""Resources that an application reserves, and whether a Ray cluster has them: pure arithmetic, no Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quire.cluster.config.app_config import AppConfig
from quire.cluster.config.scaling_sections import ReplicaResources, RouterResources
from quire.replica.config import Device

_GIB = 1024**3
_NAMES = {"CPU": "CPU", "GPU": "GPU", "memory": "GiB of memory"}


@dataclass(frozen=True, slots=True)
class Reservation:
    """Resources that each of `count` equal processes reserves."""

    kind: str  # "replica" or "router"
    count: int
    each: Mapping[str, float]  # by Ray's name: CPU, GPU, memory (bytes)


def device_of(config: AppConfig, nodes: Sequence[Mapping[str, float]]) -> Device:
    """Device of the replicas; `auto` is a GPU if any node has one."""
    if config.device != "auto":
        return config.device
    return "cuda" if any(node.get("GPU", 0) > 0 for node in nodes) else "cpu"


def num_gpus(config: AppConfig, device: str) -> float:
    """Number of GPUs per replica."""
    if config.replica_resources.num_gpus is not None:
        return config.replica_resources.num_gpus
    return 1 if device == "cuda" else 0


def reserved(resources: ReplicaResources | RouterResources, gpus: float = 0) -> dict[str, float]:
    """Resources of one process, by Ray's names."""
    memory = int((resources.memory_gib or 0) * _GIB)
    return {"CPU": resources.num_cpus, "GPU": gpus, "memory": memory}


def reservations(config: AppConfig, device: str) -> tuple[Reservation, Reservation]:
    """Resources of the whole application. The ranks of a replica are on one node."""
    each = reserved(config.replica_resources, num_gpus(config, device))
    replica = {name: amount * config.engine.tensor_parallel for name, amount in each.items()}
    return (
        Reservation("replica", config.replicas, replica),
        Reservation("router", config.routers, reserved(config.router_resources)),
    )


def lacking(
    reservations: Sequence[Reservation], nodes: Sequence[Mapping[str, float]]
) -> str | None:
    """Describe a resource of which one process needs more than any node has, or all processes more than all nodes have.

    Returns None if everything fits.

    Parameters
    ----------
    reservations
        The processes of one application.
    nodes
        All resources of each node, used or not.
    """
    for reservation in reservations:
        for name, each in reservation.each.items():
            largest = max((node.get(name, 0) for node in nodes), default=0)
            if each > largest:
                needs = f"a {reservation.kind} needs {_amount(name, each)}"
                return f"{needs}, and no node has more than {_number(name, largest)}"
    for name in {name: None for reservation in reservations for name in reservation.each}:
        needed = sum(r.count * r.each.get(name, 0) for r in reservations)
        total = sum(node.get(name, 0) for node in nodes)
        if needed > total:
            parts = [
                f"{r.count} {r.kind}{'s' * (r.count > 1)}" for r in reservations if r.each.get(name)
            ]
            return f"{' and '.join(parts)} need {_amount(name, needed)}, and all nodes have {_number(name, total)}"
    return None


def _amount(name: str, value: float) -> str:
    return f"{_number(name, value)} {_NAMES.get(name, name)}"


def _number(name: str, value: float) -> str:
    return f"{value / _GIB if name == 'memory' else value:g}"
