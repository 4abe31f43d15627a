"""`python -m tests.perf NAME [options]`: run one benchmark, which writes tests/perf/results/NAME.json.

A name may be written with dashes: gpu-kernels.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

# Folder in tests/perf, name of the benchmark and of its module, what it measures.
BENCHMARKS = {
    "cpu": {
        "cpu_attention": "attention on the CPU, one layer: native, torch, SDPA, and the machine's floor",
        "cpu_linear": "packed matrix products on the CPU against torch's and a copy",
        "cpu_w4": "decode on the CPU with weights of 4 bits against bfloat16, in turns",
        "cpu_recurrent": "recurrent layers on the CPU in Quire's kernels against transformers' modules, in turns",
        "cpu_step": "a step of a 0.6B model on the CPU, fused and not; --dtype float32 for deterministic",
        "cpu_workloads": "W1 to W5 on the 0.6B shape against other engines, from recorded turns",
        "kv_transport": "KV blocks from node to node: bytes per second, and a pulled prefix against a computed one",
        "checkpoint_copy": "a checkpoint from another node, against a copy without Ray",
        "step_profile": "where the time of an engine's step goes",
    },
    "engine": {
        "guard": "fails when Quire has become slower, as a ratio to transformers; runs in CI",
        "busy_interpreter": "a step beside a thread that keeps Python busy, with its switch interval and a replica's",
        "host_overhead": "host time per step, against transformers' continuous batching",
        "scaling": "time of a step against tokens, waiting requests, cached blocks, tokens generated",
        "node_pool": "the node's pool: publishing, SIGKILL, eight engines with one pool, damaged blocks",
        "lora": "throughput of a hundred adapters over one model, against the model alone",
        "deterministic": "tokens per second with and without bit-equal results",
        "tensor_parallel": "two ranks against one on the same cores",
        "families": "which of transformers' model types are served, against `generate`",
        "real_models": "trained checkpoints against transformers: greedy tokens, and log-probabilities of text",
        "speculation": "tokens per second with drafts and without, on text that repeats and text that does not",
    },
    "router": {
        "router_index": "speed of a routing decision and of the prefix index",
        "router_rebuild": "time for a new router to learn 2 million blocks, and its hits meanwhile",
        "router_admission": "time to admit a request, and to refuse one",
        "router_tokenizer": "time to tokenise the next turn of a chat, with and without the previous turn's tokens",
        "routersim": "the routing policies in a simulated cluster, against a pooled oracle",
        "bus_overhead": "Python per token on both sides of the bus",
        "many_routers": "4, 8 and 16 routers on a real cluster: hits, agreement of their indexes, streams",
    },
    "router.costs": {
        "auth_cost": "time that a key, its quotas and a line of usage add to a request",
        "trace_cost": "processor time that traces add to a request",
        "page_cost": "what an open live page costs a router, in CPU time for a request",
        "regret_cost": "processor time of the regret of decisions, and what it does to the event loop",
    },
    "cluster": {
        "serving": "start-up, idle CPU and answers of the real cluster",
        "system_throughput": "HTTP through two routers against the engine alone",
        "data_plane": "streams through the whole system, with a device that takes 20 ms a step",
        "tls_cost": "what TLS adds to a streamed token, against the plain ports, in turns",
        "ray_routers": "Quire against Ray Serve's own request routers, in turns; --mix spread or hot",
        "truth": "the routers' view of the caches against their contents: a trace on a real cluster",
    },
    "agents": {
        "router_cost": "processor time of the routers for a million prompt tokens of agents, with tokenising",
        "agents": "agents on a real cluster: token hits and TTFT, against round_robin and Serve's router",
        "over_oracle": "agents in virtual time against a pooled oracle, with pulls between nodes and without",
        "disaggregated": "long prompts next to streams that decode, with prefill replicas and without, in turns",
    },
    "gpu": {
        "gpu_plan": "the three commands of docs/measuring_on_a_gpu.md: make gpu-1, gpu-2, gpu-3",
        "gpu_rehearse": "the three commands without a GPU, on a copy without git and a network",
        "gpu_smoke": "does the engine run on this GPU: every served architecture, tiny; --rehearse without one",
    },
    "gpu.kernels": {
        "gpu_kernels": "the Triton kernels on a GPU against its roof and other libraries; --rehearse without one",
        "gpu_tune": "candidates for the attention kernels' tiles on this GPU; --rehearse without one",
    },
    "gpu.engine": {
        "gpu_engine": "the engine on a GPU: tokens, steps, offloading, start, against transformers; "
        "--rehearse without one",
        "gpu_profile": "where a decode step's time goes on a GPU; --rehearse without one",
    },
}


def import_benchmark(name: str) -> ModuleType:
    """Import the module of a benchmark, whose `main()` runs it.

    Raises
    ------
    KeyError
        No benchmark has this name.
    """
    name = name.replace("-", "_")
    if name == "checkpoints":
        return importlib.import_module("quire.cluster.bench.engines.checkpoints")
    folders = {known: folder for folder, names in BENCHMARKS.items() for known in names}
    return importlib.import_module(f"tests.perf.{folders[name]}.{name}")


def main() -> int:
    """Run the benchmark that the command line names; print all names if it names none."""
    try:
        benchmark = import_benchmark(sys.argv[1] if len(sys.argv) > 1 else "")
    except KeyError:
        print("usage: python -m tests.perf NAME [options]")
        for folder, names in BENCHMARKS.items():
            print(f"\ntests/perf/{folder.replace('.', '/')}")
            for name, description in names.items():
                print(f"  {name:20}{description}")
        print(
            "\n  checkpoints         makes a checkpoint with random weights and the shape of a real model"
        )
        return 0 if sys.argv[1:] == ["--help"] else 2
    del sys.argv[1]
    return benchmark.main()


if __name__ == "__main__":
    sys.exit(main())
