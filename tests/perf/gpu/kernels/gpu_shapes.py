"""Shapes of models and batches for the GPU benchmark."""

from __future__ import annotations

from dataclasses import dataclass, replace

MAX_LEN = 131_072  # tokens of the longest request


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of a model that the kernels depend on, from the published configurations."""

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    qk_norm: bool

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in one layer, in bfloat16."""
        return 4 * self.kv_heads * self.head_dim


MODELS = {
    "Llama-3.1-8B": Model(32, 8, 128, 4096, 14336, False),
    "Qwen3-8B": Model(32, 8, 128, 4096, 12288, True),
    "Qwen3-0.6B": Model(16, 8, 128, 1024, 3072, True),
}
_TINY = Model(4, 2, 64, 128, 256, False)  # the interpreter takes about a millisecond per operation
# Models with different attention; Qwen3-8B has that of Llama-3.1-8B.
ATTENTION_MODELS = ("Llama-3.1-8B", "Qwen3-0.6B")


def model_of(name: str, rehearsal: bool) -> Model:
    """The model with this name; in a rehearsal a tiny one with the same options."""
    model = MODELS[name]
    return replace(_TINY, qk_norm=model.qk_norm) if rehearsal else model


def uniform_lengths(batch: int, context: int) -> list[int]:
    """The same length for every row."""
    return [context] * batch


def skewed_lengths(batch: int, context: int) -> list[int]:
    """The same total of tokens with Zipf's shares, 1 / (i + 1) for row i; each row has 1 to `MAX_LEN` tokens.

    Tokens above `MAX_LEN` are spread evenly over the other rows.
    """
    spread = batch * (context - 1)
    harmonic = sum(1 / (i + 1) for i in range(batch))
    lengths = [1 + min(int(spread / harmonic / (i + 1)), MAX_LEN - 1) for i in range(batch)]
    rest = batch * context - sum(lengths)
    while rest > 0:
        open_rows = [i for i, length in enumerate(lengths) if length < MAX_LEN]
        share = max(rest // len(open_rows), 1)
        for i in open_rows:
            taken = min(share, MAX_LEN - lengths[i], rest)
            lengths[i] += taken
            rest -= taken
    return lengths


LENGTHS = {"uniform": uniform_lengths, "skewed": skewed_lengths}
