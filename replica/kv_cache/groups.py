"""Layer groups: layers that share block ids because their queries see keys at the same positions.

All groups share one pool of blocks of equal size: a block holds `block_size` tokens of one group's layers. So every
group can use any free block, and admission only compares the number of blocks needed with the number available. A model
with one kind of layers has one group. Other models have unequal numbers of each kind (Gemma 3 has one full-attention
layer for five sliding-window layers), so each kind is cut into groups whose layers fit into one block. Of larger layers
a block has fewer. A group with fewer layers than fit leaves a part of each of its blocks unused. A layer that reads an
earlier layer's keys and values takes no room: it is a reader of that layer's group.

```
 kinds    full: 5 layers                 sliding 1024: 29 layers                                     (34 layers)
 width 6  [f f f f f .]   [s s s s s s] [s s s s s s] [s s s s s s] [s s s s s s] [s s s s s .]     6 groups
```
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

import numpy as np

Positions = TypeVar("Positions", int, np.ndarray)

# Largest allowed memory overhead of padding groups to the width of a block. Less padding needs narrower and therefore
# more groups, each with a block table of its own.
_MAX_PADDING = 1 / 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """What a layer's queries see, and the shape of its keys and values. Layers of one kind can share block ids."""

    # Query heads; None: as many as most layers have.
    num_heads: int | None = None

    # Number of keys that a query sees, its own included; None: no window.
    window: int | None = None
    # Positions are cut into chunks of this length, and a query sees keys of its own chunk only; None: no chunks.
    chunk: int | None = None
    num_kv_heads: int = 1
    # Elements of a key.
    head_dim: int = 1
    # Elements of a value; None: as many as a key has.
    value_dim: int | None = None
    # A value is the beginning of its key and is not stored again (latent attention).
    values_in_keys: bool = False
    # An earlier layer whose keys and values it reads; it stores none then. None: it stores its own.
    source: int | None = None

    def __post_init__(self) -> None:
        for name in ("window", "chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    @property
    def token_elements(self) -> int:
        """Elements of one token's keys and values in one layer."""
        stored = self.head_dim + (0 if self.values_in_keys else self.value_size)
        return self.num_kv_heads * stored

    @property
    def value_size(self) -> int:
        """Elements of a value."""
        return self.value_dim or self.head_dim

    @property
    def has_equal_sizes(self) -> bool:
        """Whether keys and values are stored apart and have the same number of elements."""
        return self.value_size == self.head_dim and not self.values_in_keys

    @property
    def is_full(self) -> bool:
        return self.window is None and self.chunk is None

    def first_key(self, position: Positions) -> Positions:
        """Position of the first key that a query at `position` sees; later queries see no earlier key."""
        first = position * 0
        if self.window is not None:
            first = np.maximum(first, position - self.window + 1)
        if self.chunk is not None:
            first = np.maximum(first, position // self.chunk * self.chunk)
        return first

    def max_blocks(self, num_tokens: int, step_tokens: int, block_size: int) -> int:
        """Largest number of blocks that a sequence owns at once while it grows to `num_tokens`.

        It grows by at most `step_tokens` in one step.
        """
        whole = -(-num_tokens // block_size)
        if self.is_full:
            return whole
        reach = min(width for width in (self.window, self.chunk) if width is not None)
        # Round up by one block: the first key that the step needs may be the last one of its block.
        return min(whole, -(-(reach - 1 + step_tokens + block_size - 1) // block_size))


@dataclass(frozen=True, slots=True)
class LayerGroup(LayerKind):
    """Layers of one kind that share block ids."""

    # Layers that store keys and values.
    layers: tuple[int, ...] = ()
    # (layer, its source) for each layer that stores none and reads those of one of `layers`.
    readers: tuple[tuple[int, int], ...] = ()


FULL_ATTENTION = LayerGroup()


def group_layers(kinds: Sequence[LayerKind | None]) -> tuple[LayerGroup, ...]:
    """Cut a model's layers into groups, full-attention groups first.

    Parameters
    ----------
    kinds
        Kind of each layer; None: it has no keys and values.

    Raises
    ------
    ValueError
        A layer reads from a layer that stores nothing, or that is of another kind.
    """
    layers: dict[LayerKind, list[int]] = {}
    for layer, kind in enumerate(kinds):
        if kind is None:
            continue
        if kind.source is None:
            layers.setdefault(kind, []).append(layer)
        elif replace(kind, source=None) != kinds[kind.source]:
            raise ValueError(
                f"layer {layer} is {kind}, but layer {kind.source} that it reads is {kinds[kind.source]}"
            )
    if not layers:
        # Blocks of no layers: they only count the tokens of requests.
        return (FULL_ATTENTION,)
    width = _block_width({kind: len(members) for kind, members in layers.items()})
    groups = []
    for kind, members in layers.items():
        count = width // kind.token_elements
        for start in range(0, len(members), count):
            part = tuple(members[start : start + count])
            readers = tuple(
                (i, k.source) for i, k in enumerate(kinds) if k is not None and k.source in part
            )
            groups.append(LayerGroup(part, readers, **asdict(kind)))
    return tuple(sorted(groups, key=lambda group: not group.is_full))


def _block_width(counts: Mapping[LayerKind, int]) -> int:
    """Return the elements of one token in a block, for a number of layers of each kind.

    The widest block that wastes at most `_MAX_PADDING` of the pool, else the block that wastes least.
    """
    needed = sum(count * kind.token_elements for kind, count in counts.items())

    def padded(width: int) -> int:
        return sum(
            -(-count // (width // kind.token_elements)) * width for kind, count in counts.items()
        )

    least = max(kind.token_elements for kind in counts)
    widths = {
        number * kind.token_elements
        for kind, count in counts.items()
        for number in range(1, count + 1)
    }
    possible = [width for width in widths if width >= least]
    return max(
        (width for width in possible if padded(width) <= needed * (1 + _MAX_PADDING)),
        default=min(possible, key=padded),
    )


def max_sequence_tokens(
    groups: Sequence[LayerGroup], num_blocks: int, block_size: int, bound: int
) -> int:
    """Length in tokens of the longest sequence that fits into `num_blocks`, in whole blocks and at most `bound`.

    A model with a single full-attention group can use the whole pool, and `bound` is ignored.
    """
    if len(groups) == 1 and groups[0].is_full:
        return num_blocks * block_size
    low, high = 0, -(-bound // block_size)
    # Find the largest number of whole blocks that fits.
    while low < high:
        middle = (low + high + 1) // 2
        fits = sequence_blocks(groups, middle * block_size, 1, block_size) <= num_blocks
        low, high = (middle, high) if fits else (low, middle - 1)
    return min(low * block_size, bound)


def sequence_blocks(
    groups: Sequence[LayerGroup], num_tokens: int, step_tokens: int, block_size: int
) -> int:
    """Sum of `LayerGroup.max_blocks` over all groups."""
    return sum(group.max_blocks(num_tokens, step_tokens, block_size) for group in groups)
