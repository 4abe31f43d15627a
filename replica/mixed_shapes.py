"""Shapes that mixed steps are padded to, so that few graphs serve many steps. Policy only.

```
 step    | d | d | d | p p p p p p p p | p p p |                3 rows that decode, 2 chunks: 14 tokens in 5 rows
 graph   | d | d | d | p p p p p p p p | p p p | + + | | |      16 tokens (q_padding 8) in 8 rows: one row of padding
                                                                has the 2 tokens, the others have none
```

Padding tokens need a row of their own, so a graph has one row more than the step at least. Attention reads lengths on
the device; what `kv_padding` bounds are the block tables that the graph gathers, and the padding row's table must hold
the padding too.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.replica.graph_key import GraphKey, GraphPart

# One row that decodes beside one that prefills, and a token of padding: below, a graph would lack one of attention's
# two kernels.
LEAST_TOKENS = 4


@dataclass(frozen=True, slots=True)
class MixedShapes:
    """Pads mixed steps.

    Parameters
    ----------
    max_rows, max_tokens
        Of a step.
    max_kv_tokens
        That a row's table of blocks holds.
    q_padding
        Tokens of a step are padded to a multiple of it, or to `max_tokens`.
    kv_padding
        The longest row's tokens in the cache to a multiple of it, or to `max_kv_tokens`; None: always to that.

    Raises
    ------
    ValueError
        `q_padding` or `kv_padding` out of its bounds.
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
        """The graph that suits a step best.

        Parameters
        ----------
        kv_len
            Tokens in the cache of the longest row.
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
        """Whether a graph holds a step and its own padding."""
        padding = key.num_tokens - num_tokens
        return num_rows < key.num_rows and padding >= 0 and max(kv_len, padding) <= key.kv_tokens

    def first(self) -> list[GraphKey]:
        """What steps will need most likely, largest first: powers of two, of the longest rows."""
        tokens = [self.max_tokens]
        size = self.q_padding
        while size < self.max_tokens:
            tokens.append(size)
            size *= 2
        rows = {self._pad_rows(2**i) for i in range(1, self.max_rows.bit_length() + 1)}
        return [
            GraphKey(n, GraphPart.WHOLE, size, self.max_kv_tokens)
            for size in sorted(tokens, reverse=True)
            for n in sorted(rows, reverse=True)
            if size <= n * self.max_kv_tokens
        ]

    def _pad_tokens(self, count: int) -> int:
        return min(-(-count // self.q_padding) * self.q_padding, self.max_tokens)

    def _pad_rows(self, count: int) -> int:
        return min(max(2, 1 << (count - 1).bit_length()), self.max_rows + 1)

    def _pad_kv(self, count: int) -> int:
        if self.kv_padding is None:
            return self.max_kv_tokens
        return min(-(-count // self.kv_padding) * self.kv_padding, self.max_kv_tokens)
