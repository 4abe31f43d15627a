"""`python -m quire.bench NAME [options]`: one benchmark. Each writes bench/results/NAME.json."""

from __future__ import annotations

import importlib
import sys

BENCHMARKS = {
    "serving": "start-up, idle CPU and answers of the real cluster",
    "host_overhead": "host time per step, against transformers' continuous batching",
    "bus_overhead": "Python per token on both sides of the bus",
    "routersim": "the routing policies in a simulated cluster, against a pooled oracle",
    "router_index": "speed of a routing decision and of the prefix index",
}


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in BENCHMARKS:
        print("usage: python -m quire.bench NAME [options]\n")
        for name, what in BENCHMARKS.items():
            print(f"  {name:16}{what}")
        return 2
    name = sys.argv.pop(1)
    return importlib.import_module(f"quire.bench.{name}").main()


if __name__ == "__main__":
    sys.exit(main())
