"""`python -m tests.perf NAME [options]`: one benchmark. Each writes tests/perf/results/NAME.json.

A name may be written with dashes: gpu-kernels.
"""

from __future__ import annotations

import importlib
import sys

BENCHMARKS = {
    "checkpoints": "makes a checkpoint with random weights and the shape of a real model",
    "step_profile": "where the time of an engine's step goes",
    "guard": "fails when Quire has become slower, as a ratio to transformers; runs in CI",
    "cpu_workloads": "W1 to W5 on the 0.6B shape beside other engines, from turns that were kept",
    "startup": "from a new process to its first token, and the memory it holds",
    "system_throughput": "HTTP through two routers against the engine alone",
    "scaling": "time of a step against tokens, waiting requests, cached blocks, tokens generated",
    "serving": "start-up, idle CPU and answers of the real cluster",
    "host_overhead": "host time per step, against transformers' continuous batching",
    "deterministic": "tokens per second with and without bit-equal results",
    "cpu_attention": "attention on the CPU, one layer: native, torch, SDPA, and the machine's floor",
    "cpu_linear": "packed matrix products on the CPU against torch's and a copy",
    "cpu_step": "a step of a 0.6B model on the CPU, fused and not; --dtype float32 for deterministic",
    "bus_overhead": "Python per token on both sides of the bus",
    "gpu_kernels": "the Triton kernels on a GPU against its roof and other libraries; --rehearse without one",
    "gpu_engine": "the engine on a GPU: tokens, steps, offloading, start, against transformers; --rehearse without one",
    "gpu_smoke": "does the engine run on this GPU: every served architecture, tiny; --rehearse without one",
    "gpu_tune": "candidates for the attention kernels' tiles on this GPU; --rehearse without one",
    "gpu_profile": "where a decode step's time goes on a GPU; --rehearse without one",
    "gpu_plan": "the three commands of docs/measuring_on_a_gpu.md: make gpu-1, gpu-2, gpu-3",
    "gpu_rehearse": "the three commands without a GPU, on a copy without git and a network",
    "routersim": "the routing policies in a simulated cluster, against a pooled oracle",
    "router_tokenizer": "tokenising the next turn of a chat, with and without what is remembered",
    "router_admission": "what admission costs: a request that passes, and one that is refused",
    "truth": "what routers believe against what caches hold: a trace on a real cluster",
    "data_plane": "streams through the whole system, with a device that takes 20 ms a step",
    "ray_routers": "beside Ray Serve's own request routers, in turns; --mix spread or hot",
    "router_index": "speed of a routing decision and of the prefix index",
}


def main() -> int:
    name = sys.argv[1].replace("-", "_") if len(sys.argv) > 1 else ""
    if name not in BENCHMARKS:
        print("usage: python -m tests.perf NAME [options]\n")
        for known, what in BENCHMARKS.items():
            print(f"  {known:16}{what}")
        return 2
    del sys.argv[1]
    package = "quire.cluster.bench" if name == "checkpoints" else "tests.perf"
    return importlib.import_module(f"{package}.{name}").main()


if __name__ == "__main__":
    sys.exit(main())
