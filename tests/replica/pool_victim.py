"""A process with an engine in the node's pool, which streams until it is killed.

Prints one line of token ids for each prompt at the end of each second.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

from quire.protos.sampling_params import SamplingParams
from quire.replica.engine import Engine
from quire.replica.node_pool.pool_file import PoolPlace

OPTIONS = {"model": "embedded", "device": "cpu", "num_threads": 1, "node_pool_gib": 0.03}


def prompts_of(count: int, repeats: int = 70) -> list[str]:
    """Prompts of about 14 tokens for each repeat, which begin differently."""
    line = "the {0}th clerk binds sheet {1} "
    return [f"Story {i}: " + line.format(i, i * i) * repeats for i in range(count)]


def main(folder: str, count: int, repeats: int) -> None:
    params = SamplingParams(max_tokens=2000, temperature=0, ignore_eos=True)
    with Engine(node_pool=PoolPlace("victim", folder=Path(folder)), **OPTIONS) as engine:
        # However fast the machine is, the budget suffices.
        engine.call(
            lambda scheduler: setattr(scheduler.memory.publishing, "max_share", 1.0)
        ).result()
        outputs: list[list[int]] = [[] for _ in range(count)]

        def stream(i: int, prompt: str) -> None:
            for output in engine.stream(prompt, params):
                outputs[i] += output.token_ids

        for i, prompt in enumerate(prompts_of(count, repeats)):
            threading.Thread(target=stream, args=(i, prompt), daemon=True).start()
        while True:
            time.sleep(0.05)
            print(json.dumps(outputs), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
