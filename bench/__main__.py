"""`python -m quire.bench NAME [options]`: one benchmark. Each writes bench/results/NAME.json."""

from __future__ import annotations

import importlib
import sys

BENCHMARKS = {
    "serving": "start-up, idle CPU and answers of the real cluster",
    "host_overhead": "host time per step, against transformers' continuous batching",
    "cpu_attention": "attention on the CPU, one layer: native, torch, SDPA, and the machine's floor",
    "bus_overhead": "Python per token on both sides of the bus",
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
