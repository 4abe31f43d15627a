"""The floor: the least time of a workload at the machine's measured memory bandwidth and GEMM rate.

A step reads every weight, and every cached key and value that a query sees, once. It also does the multiplications that
the model's shape needs. The step's floor is the longer of these two times. The floor of a workload is the sum over its
steps; a prompt prefix that requests share is computed once, and read once per step. Both rates are measured in the run
that reports the floor, so percentages of the floor can be compared between machines. The floor assumes weights in the
model's dtype: an engine that stores weights in fewer bits, as Quire does on the CPU, may be faster than the floor.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from quire.cluster.bench.load.workloads import Workload

_ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# If the first call with a dtype is this many times slower than the best, the dtype is not measured further.
_HOPELESS = 5
_COPY_BYTES = 256 << 20  # of each array, larger than any cache


@dataclass(frozen=True, slots=True)
class Rates:
    """The machine's best measured rates.

    `memory_gb_per_s` counts bytes read and written by a copy (a = b) or a triad (a = b + 3 c), the faster of the two.
    `gflop_per_s` is the rate of a large GEMM in the model's dtype or in float32, the faster of the two.
    """

    memory_gb_per_s: float
    gflop_per_s: float

    def to_json(self) -> dict[str, float]:
        return {name: round(value, 1) for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a dense decoder-only transformer that determine the floor."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layer_parameters: int  # weights of the linear layers in all decoder layers
    head_parameters: int  # vocabulary times hidden size
    element_bytes: int

    @classmethod
    def of_checkpoint(cls, folder: Path, dtype: str = "bfloat16") -> ModelShape:
        """Read config.json.

        Raises
        ------
        ValueError
            The model has experts, so the weights that a step reads depend on the tokens.
        """
        config = json.loads((folder / "config.json").read_text())
        experts = next((key for key in config if "experts" in key and config[key]), None)
        if experts:
            raise ValueError(
                f"config.json: {experts} is {config[experts]}: models with experts have no floor"
            )
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or hidden // heads
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        mlp = 3 * hidden * config["intermediate_size"]
        layers = config["num_hidden_layers"]
        return cls(
            layers,
            heads,
            kv_heads,
            head_dim,
            layers * (attention + mlp),
            config["vocab_size"] * hidden,
            _ELEMENT_BYTES[dtype],
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that every step reads."""
        return (self.layer_parameters + self.head_parameters) * self.element_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.element_bytes

    def attention_flops(self, pairs: float) -> float:
        """Floating-point operations of attention's two matrix products for a number of (query, key) pairs."""
        return 4.0 * self.num_layers * self.num_heads * self.head_dim * pairs


@dataclass(frozen=True, slots=True)
class Floor:
    """Least seconds of a workload."""

    prefill_s: float
    decode_s: float

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s


def floor_of(workload: Workload, shape: ModelShape, rates: Rates) -> Floor:
    """The floor of a workload; all its requests are submitted at once."""
    n, shared, own = workload.num_requests, workload.shared_tokens, workload.prompt_tokens
    flop_per_s, byte_per_s = rates.gflop_per_s * 1e9, rates.memory_gb_per_s * 1e9

    def seconds(flops: float, num_bytes: float) -> float:
        return max(flops / flop_per_s, num_bytes / byte_per_s)

    # Causal: the i-th token of a prompt sees i keys.
    pairs = shared**2 / 2 + n * (own * shared + own**2 / 2)
    flops = 2.0 * shape.layer_parameters * (shared + n * own) + shape.attention_flops(pairs)
    flops += 2.0 * n * shape.head_parameters
    prefill_s = seconds(flops, shape.weight_bytes)
    decode_s = 0.0
    for i in range(1, workload.output_tokens):
        flops = 2.0 * n * (shape.layer_parameters + shape.head_parameters)
        flops += n * shape.attention_flops(shared + own + i)
        cached = shared + n * (own + i)
        decode_s += seconds(flops, shape.weight_bytes + cached * shape.kv_bytes_per_token)
    return Floor(prefill_s, decode_s)


def measure_rates(dtype: str = "bfloat16", budget_s: float = 0.75) -> Rates:
    """Measure a copy, a triad and GEMMs on torch's threads.

    On a CPU without bfloat16 instructions torch multiplies bfloat16 at a tenth of its float32 rate, which would make
    the floor meaningless. So the faster of the model's dtype and float32 counts.

    Parameters
    ----------
    budget_s
        Seconds for each measurement.
    """
    import torch

    count = _COPY_BYTES // 4
    a, b, c = (torch.ones(count) for _ in range(3))
    copy_s = _best(lambda: a.copy_(b), budget_s)
    triad_s = _best(lambda: torch.add(b, c, alpha=3.0, out=a), budget_s)
    rows, inner, columns = 2048, 1024, 6144
    product_s = float("inf")
    for name in dict.fromkeys(("float32", dtype)):
        x = torch.randn(rows, inner).to(getattr(torch, name))
        weight = torch.randn(columns, inner).to(getattr(torch, name))
        product = functools.partial(torch.nn.functional.linear, x, weight)
        began = time.perf_counter()
        product()
        if time.perf_counter() - began < _HOPELESS * product_s:
            product_s = min(product_s, _best(product, budget_s))
    return Rates(
        max(2 * _COPY_BYTES / copy_s, 3 * _COPY_BYTES / triad_s) / 1e9,
        2 * rows * inner * columns / product_s / 1e9,
    )


def best_of(measured: list[Rates]) -> Rates:
    """Return the fastest rates of several measurements, because other load on the machine can only lower them."""
    return Rates(
        max(rates.memory_gb_per_s for rates in measured),
        max(rates.gflop_per_s for rates in measured),
    )


def _best(call: Callable[[], object], budget_s: float) -> float:
    """Seconds of the fastest call, after two calls for warm-up."""
    import torch

    best, until, num_calls = float("inf"), time.perf_counter() + budget_s, 0
    with torch.inference_mode():
        while num_calls < 3 or time.perf_counter() < until:
            began = time.perf_counter()
            call()
            if num_calls >= 2:
                best = min(best, time.perf_counter() - began)
            num_calls += 1
    return best
