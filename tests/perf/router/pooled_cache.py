"""What one prefix cache with the memory of all replicas would have had: the bound for any router in front of them.

Pure and exact: blocks are compared by their content and all that precedes it, the one used longest ago goes first, of
one prompt the end before the beginning. Nobody waits for anything: a prompt's blocks are there for whoever comes after
it, where replicas must compute them first and a request must have gone to the right one of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

_ROOT = 0


class PooledCache:
    """A cache that requests pass one after the other.

    Parameters
    ----------
    num_blocks
        That it holds.
    block_size
        Tokens in each.

    Raises
    ------
    ValueError
        One of them is below 1.
    """

    def __init__(self, num_blocks: int, block_size: int):
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise ValueError(f"{name}: must be >= 1, got {value}")
        self._num_blocks = num_blocks
        self._block_size = block_size
        # A block's number says what is in it and before it: (number before it, its tokens) -> number.
        self._numbers: dict[tuple[int, bytes], int] = {}
        self._next_number = _ROOT + 1
        self._held: OrderedDict[int, None] = OrderedDict()  # used longest ago first

    def __len__(self) -> int:
        """Blocks that it holds."""
        return len(self._held)

    def serve(self, prompt_ids: Sequence[int], num_output_tokens: int) -> int:
        """How many tokens of a prompt are cached; from now on the prompt and its answer are.

        A hit is whole blocks and leaves one token to compute, as in the engine. What was generated takes room as the
        prompt does, but for the last token, which is in no cache; no later prompt is taken to continue it.
        """
        size = self._block_size
        tokens = np.asarray(prompt_ids, np.int32).tobytes()
        chain, before = [], _ROOT
        for i in range(len(prompt_ids) // size):
            before = self._number(before, tokens[4 * i * size : 4 * (i + 1) * size])
            chain.append(before)
        num_hit = 0
        while num_hit < len(chain) and chain[num_hit] in self._held:
            num_hit += 1
        num_answered = (len(prompt_ids) + max(0, num_output_tokens - 1)) // size - len(chain)
        chain += [self._new_number() for _ in range(num_answered)]
        self._use(chain)
        return min(num_hit, (len(prompt_ids) - 1) // size) * size

    def _number(self, before: int, tokens: bytes) -> int:
        key = (before, tokens)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = self._new_number()
        return number

    def _new_number(self) -> int:
        self._next_number += 1
        return self._next_number - 1

    def _use(self, chain: list[int]) -> None:
        """The end first, so that a block is never given up before those that continue it."""
        held = self._held
        for number in reversed(chain):
            held[number] = None
            held.move_to_end(number)
        while len(held) > self._num_blocks:
            held.popitem(last=False)
