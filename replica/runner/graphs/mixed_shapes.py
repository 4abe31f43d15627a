"""Padded shapes of mixed steps, so that few graphs serve many steps. Computes shapes only; uses no device.

A step is mixed if some rows decode and others prefill, or all prefill.

```
 step    | d | d | d | p p p p p p p p | p p p |                3 rows that decode, 2 chunks: 14 tokens in 5 rows
 graph   | d | d | d | p p p p p p p p | p p p | + + | | |      16 tokens (q_padding 8) in 8 rows: one row of padding
                                                                has the 2 tokens, the others have none
```

Padding tokens belong to a padding row, so a graph has at least one row more than the step. Attention reads the lengths
of rows on the device, so a graph serves any lengths up to the width of the block tables that it gathers, which
`kv_padding` determines. The block table of the padding row must hold all padding tokens.

Launching a step kernel by kernel takes the host 11 to 16 ms with 32 layers. An H100 computes longer than that for 1024
tokens of a model of 8 billion parameters, so larger steps have no graph::

    tokens    256  512  768  1024      with q_padding 256; fewer where a step has fewer
    rows      4  16  64  257           for at most 256 requests; a padding row costs only its logits
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.replica.runner.graphs.graph_key import GraphKey, GraphPart

# One decoding row, one row that prefills two tokens, one padding token. A smaller graph would lack one of attention's
# two kernels.
LEAST_TOKENS = 4
# Largest graph. For more tokens the device computes longer than the host needs to launch the kernels.
GRAPH_TOKENS = 1024
# Padding up to this number of tokens is cheap: reading the weights takes longer than computing so few tokens.
CHEAP_TOKENS = 256
# Ratio of consecutive numbers of rows.
ROW_FACTOR = 4


@dataclass(frozen=True, slots=True)
class MixedShapes:
    """Pads mixed steps.

    Parameters
    ----------
    max_rows, max_tokens
        Largest numbers of rows and tokens of a step.
    max_kv_tokens
        Number of tokens that a row's block table holds.
    q_padding
        Tokens of a step are padded to a multiple of it, or to `max_tokens`. A graph has at most `GRAPH_TOKENS` or
        `q_padding` tokens; the larger of the two counts.
    kv_padding
        Cached tokens of the longest row are padded to a multiple of it. None: always to `max_kv_tokens`.

    Raises
    ------
    ValueError
        `q_padding` or `kv_padding` is out of bounds.
    """

    max_rows: int
    max_tokens: int
    max_kv_tokens: int
    q_padding: int
    kv_padding: int | None = None

    def __post_init__(self) -> None:
        highest = min(self.max_tokens, self.max_kv_tokens)
        if not LEAST_TOKENS <= self.q_padding <= highest:
            raise ValueError(
                f"q_padding must be in [{LEAST_TOKENS}, {highest}], the tokens of a step and of a request, got "
                f"{self.q_padding}"
            )
        if self.kv_padding is not None and self.kv_padding < 1:
            raise ValueError(f"kv_padding must be at least 1, got {self.kv_padding}")

    def pad(self, num_rows: int, num_tokens: int, kv_len: int, part: GraphPart) -> GraphKey:
        """Return the smallest padded shape of a step.

        Parameters
        ----------
        kv_len
            Cached tokens of the longest row.
        """
        tokens = self._pad_tokens(num_tokens)
        return GraphKey(
            self._pad_rows(num_rows + 1),
            part,
            tokens,
            self._pad_kv(max(kv_len, tokens - num_tokens)),
        )

    @staticmethod
    def fits(key: GraphKey, num_rows: int, num_tokens: int, kv_len: int) -> bool:
        """Whether a step and its padding fit into a graph."""
        padding = key.num_tokens - num_tokens
        return num_rows < key.num_rows and padding >= 0 and max(kv_len, padding) <= key.kv_tokens

    @property
    def max_graph_tokens(self) -> int:
        """Tokens of the largest graph; larger steps have none."""
        multiple = max(self.q_padding, GRAPH_TOKENS // self.q_padding * self.q_padding)
        return min(multiple, self.max_tokens)

    def serves(self, key: GraphKey, num_rows: int, num_tokens: int, kv_len: int) -> bool:
        """Whether a step fits into a graph with so little padding that the graph pays."""
        return (
            self.fits(key, num_rows, num_tokens, kv_len)
            and key.num_tokens - num_tokens < max(self.q_padding, CHEAP_TOKENS)
            and key.num_rows <= ROW_FACTOR * (num_rows + 1)
        )

    def first(self) -> list[GraphKey]:
        """Shapes to capture at start, largest first, so that every step of at most `max_graph_tokens` has a graph."""
        tokens = {self.max_graph_tokens}
        size = self.q_padding
        most = max(self.q_padding, CHEAP_TOKENS // self.q_padding * self.q_padding)
        while size < self.max_graph_tokens:
            tokens.add(size)
            size += min(size, most)
        rows = [self.max_rows + 1]
        while rows[-1] // ROW_FACTOR >= 2:
            rows.append(rows[-1] // ROW_FACTOR)
        return [
            GraphKey(n, GraphPart.WHOLE, size, self.max_kv_tokens)
            for size in sorted(tokens, reverse=True)
            for n in rows
            if size <= n * self.max_kv_tokens
        ]

    def _pad_tokens(self, count: int) -> int:
        return min(-(-count // self.q_padding) * self.q_padding, self.max_tokens)

    def _pad_rows(self, count: int) -> int:
        size = self.max_rows + 1
        while size // ROW_FACTOR >= max(count, 2):
            size //= ROW_FACTOR
        return size

    def _pad_kv(self, count: int) -> int:
        if self.kv_padding is None:
            return self.max_kv_tokens
        return min(-(-count // self.kv_padding) * self.kv_padding, self.max_kv_tokens)
