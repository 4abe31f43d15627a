"""Whether the nodes of a Ray cluster have what an application reserves: pure arithmetic, no Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_GIB = 1024**3
_NAMES = {"CPU": "CPUs", "GPU": "GPUs", "memory": "GiB of memory"}


@dataclass(frozen=True, slots=True)
class Reservation:
    """What `count` copies of one kind of process reserve, each the same."""

    kind: str  # "replica" or "router"
    count: int
    each: Mapping[str, float]  # by Ray's name: CPU, GPU, memory (bytes)


def lacking(
    reservations: Sequence[Reservation], nodes: Sequence[Mapping[str, float]]
) -> str | None:
    """What no node has enough of for one copy, or the whole cluster for all; None where everything fits.

    Parameters
    ----------
    reservations
        Of one application.
    nodes
        All resources of each node, used or not.
    """
    for reservation in reservations:
        for name, each in reservation.each.items():
            largest = max((node.get(name, 0) for node in nodes), default=0)
            if each > largest:
                return (
                    f"a {reservation.kind} needs {_amount(name, each)}, "
                    f"and the largest node has {_number(name, largest)}"
                )
    for name in {name: None for reservation in reservations for name in reservation.each}:
        needed = sum(r.count * r.each.get(name, 0) for r in reservations)
        total = sum(node.get(name, 0) for node in nodes)
        if needed > total:
            parts = [f"{r.count} {r.kind}s" for r in reservations if r.each.get(name)]
            return f"{' and '.join(parts)} need {_amount(name, needed)}, and there are {_number(name, total)}"
    return None


def _amount(name: str, value: float) -> str:
    return f"{_number(name, value)} {_NAMES.get(name, name)}"


def _number(name: str, value: float) -> str:
    return f"{value / _GIB if name == 'memory' else value:g}"
