"""Several Ray nodes on this machine, in a process of their own: a head without CPUs, and workers as in k8s/.

Arguments: the dashboard's port, and a folder. Worker i has its home in folder i of that folder, as a machine of its own
would, so only some workers may have a model of the Hugging Face hub.

It prints one JSON line when they run, adds a worker for each line that it reads, and ends them at the end of its input.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster

NUM_WORKERS = 3
# Room for one replica and routers, as a worker of k8s/ has it.
WORKER = {"num_cpus": 2, "object_store_memory": 80 * 1024**2}


def worker(home: Path) -> dict[str, Any]:
    """The options of a worker with this home folder."""
    home.mkdir(exist_ok=True)
    return {**WORKER, "env_vars": {"HOME": str(home)}}


def main() -> None:
    """Run the nodes."""
    homes = (Path(sys.argv[2]) / str(i) for i in itertools.count())
    head = {"num_cpus": 0, "object_store_memory": 80 * 1024**2}
    head |= {"include_dashboard": True, "dashboard_port": int(sys.argv[1])}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(NUM_WORKERS):
            nodes.add_node(wait=False, **worker(next(homes)))
        nodes.wait_for_nodes()
        print(json.dumps({"address": nodes.address}), flush=True)
        for _ in sys.stdin:
            nodes.add_node(wait=False, **worker(next(homes)))
    finally:
        nodes.shutdown()


if __name__ == "__main__":
    main()
