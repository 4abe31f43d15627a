"""Ranks of a tensor-parallel replica as Ray actors, in the bundles of the replica's placement group.

```
 placement group, STRICT_PACK     bundle 0: the replica, rank 0   bundle 1: rank 1   ...
```

The replica owns the actors, so Ray ends them with it. In the other direction the replica ends its own process when the
connection to a rank ends (`Engine.watch`); its streams continue on other replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

_END_S = 5.0  # for a rank to end after its connection has


class RankActor:
    """A process that runs one rank."""

    def follow(self, folder: str, rank: int) -> None:
        """Run until the replica ends (`following_rank.follow`)."""
        from quire.replica.ranks.following_rank import follow  # imports torch

        follow(Path(folder), rank)


def actor_starter() -> Callable[[Path, int], Callable[[], None]]:
    """Return the `start_rank` of an engine in the first bundle of a placement group."""
    group: PlacementGroup = ray.util.get_current_placement_group()

    def start(folder: Path, rank: int) -> Callable[[], None]:
        each = group.bundle_specs[rank]
        actor = (
            ray.remote(RankActor)
            .options(
                num_cpus=each.get("CPU", 0),
                num_gpus=each.get("GPU", 0),
                memory=each.get("memory"),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank),
            )
            .remote()
        )
        following = actor.follow.remote(str(folder), rank)

        def end() -> None:
            ray.wait([following], timeout=_END_S)
            ray.kill(actor)

        return end

    return start
