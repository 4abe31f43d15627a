"""The process that `quire bench startup` measures: `python -m quire.cluster.bench.engines.first_token ENGINE`.

ENGINE is JSON with the fields of EngineArgs. The process prints a JSON line at its first token, and one after it has
written every block of its cache, with its memory. Then it waits for the end of its standard input.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

PROMPT_TOKENS = 16


def main() -> None:
    """Run the process."""
    began_s = time.time()
    from quire.protos.sampling_params import SamplingParams
    from quire.replica.engine import Engine

    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    with Engine(**json.loads(sys.argv[1])) as engine:
        ready_s = time.time()
        engine.generate([[5 + i for i in range(PROMPT_TOKENS)]], params, progress=False)
        first_s = time.time() - ready_s
        known_s = sum(engine.startup_s.values())
        phases = {
            **engine.startup_s,
            "other": ready_s - began_s - known_s,
            "first_token": first_s,
        }
        _print_json({"began_s": began_s, "phases_s": phases})
        _fill_cache(engine, params)
        _print_json(_memory(engine))
        sys.stdin.read()


def _print_json(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


def _fill_cache(engine: Any, params: Any) -> None:
    """Compute as many tokens as the cache holds. The pool hands out unused blocks first, so all are written."""
    config = engine.config
    length = config.max_model_len - 1
    for i in range(-(-config.num_blocks * config.block_size // length)):
        prompt = [(7 * j + 13 * i) % config.vocab_size for j in range(length)]
        engine.generate([prompt], params, progress=False)


def _memory(engine: Any) -> dict[str, int]:
    status = Path("/proc/self/status").read_text()
    runner = engine._loop._runner
    pool, model = runner.pool, runner.model
    # Parameters, and packed weights that replace them on the CPU.
    held = (getattr(module, "packed", None) for module in model.modules())
    packed = {id(weight): weight.num_bytes for weight in held if weight is not None}
    return {
        "peak_rss_bytes": 1024 * int(status.partition("VmHWM:")[2].split()[0]),
        "weights_bytes": sum(packed.values()) + sum(p.nbytes for p in model.parameters()),
        "cache_bytes": pool.data.numel() * pool.data.element_size(),
        # The half-filled block of the last prompt was written too.
        "blocks_without_content": engine.call(lambda s: s.load().blocks_free).result(),
    }


if __name__ == "__main__":
    main()
