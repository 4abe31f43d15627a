"""Two Ray nodes with homes of their own, of which one has a model of the Hugging Face hub; neither reaches the hub.

Argument: a folder for the homes. Prints a JSON object: what the node without the model gets, and what it then has.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from quire.replica.builtin_model import CHECKPOINT
from quire.replica.checkpoint.checkpoint import resolve_checkpoint, weights_revision
from quire.replica.checkpoint.checkpoint_copy import copy_digest
from quire.replica.checkpoint.model_spec import CheckpointError
from quire.replica.serving.node_checkpoints import bring_checkpoint

HUB_ID = "quire/embedded"
COMMITS = ["0" * 40, "1" * 40]
STORE_BYTES = 80 << 20


def put_in_hub(home: Path, commit: str) -> None:
    """Make the embedded model the newest commit of `HUB_ID` in the hub's cache of a home."""
    cache = home / ".cache/huggingface/hub" / f"models--{HUB_ID.replace('/', '--')}"
    shutil.copytree(CHECKPOINT, cache / "snapshots" / commit)
    (cache / "refs").mkdir(exist_ok=True)
    (cache / "refs" / "main").write_text(commit)


@ray.remote(num_cpus=0)
def get(model: str, weights: bool = True) -> dict[str, Any]:
    """What a replica (a router without weights) does at its start."""
    began_s = time.monotonic()
    try:
        bring_checkpoint(model, None, weights=weights)
        folder = resolve_checkpoint(model, weights=weights)
    except CheckpointError as error:
        return {"error": str(error), "seconds": time.monotonic() - began_s}
    return {
        "seconds": time.monotonic() - began_s,
        "is_own": folder.is_relative_to(Path.home()),
        "revision": weights_revision(folder) if weights else "",
        "digest": copy_digest(folder, weights=weights),
        "weight_files": [path.name for path in folder.glob("*.safetensors")],
    }


def main(folder: Path) -> None:
    """Run the nodes and the cases."""
    homes = [folder / "without", folder / "with"]
    for home in homes:
        home.mkdir()
    put_in_hub(homes[1], COMMITS[0])
    without, having = ({"HOME": str(home)} for home in homes)
    options = {"num_cpus": 1, "object_store_memory": STORE_BYTES}
    nodes = Cluster(initialize_head=True, head_node_args={**options, "env_vars": without})
    try:
        other = nodes.add_node(**options, env_vars=having)
        nodes.wait_for_nodes()
        ray.init(nodes.address, log_to_driver=False)
        affinity = NodeAffinitySchedulingStrategy(nodes.head_node.node_id, soft=False)
        on_first = get.options(scheduling_strategy=affinity)
        found = {
            "router": ray.get(on_first.remote(HUB_ID, weights=False)),
            "replica": ray.get(on_first.remote(HUB_ID)),
            "unknown": ray.get(on_first.remote("quire/unknown")),
            "no_folder": ray.get(on_first.remote("/models/unknown")),
        }
        put_in_hub(homes[1], COMMITS[1])
        # Both at once: one copies, the other one waits.
        found["changed"], found["beside"] = ray.get([on_first.remote(HUB_ID) for _ in range(2)])
        nodes.remove_node(other)
        found["alone"] = ray.get(on_first.remote(HUB_ID))
        print(json.dumps(found), flush=True)
    finally:
        ray.shutdown()
        nodes.shutdown()


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    main(Path(sys.argv[1]))
