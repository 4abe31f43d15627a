"""A prefix cache with the memory of all replicas: an upper bound of the hits of any router.

Pure and exact. Blocks are equal if their tokens and all tokens before them are equal. Eviction is LRU, and the end of a
prompt is evicted before its beginning. The blocks of a prompt are available to the next request at once, while replicas
must compute them first, and a request only hits on the replica that has them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

_ROOT = 0


class PooledCache:
    """A cache that serves requests one after the other.

    Parameters
    ----------
    num_blocks
        Capacity in blocks.
    block_size
        Tokens per block.

    Raises
    ------
    ValueError
        A parameter is below 1.
    """

    def __init__(self, num_blocks: int, block_size: int):
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise ValueError(f"{name}: must be >= 1, got {value}")
        self._num_blocks = num_blocks
        self._block_size = block_size
        # A block's number identifies its tokens and all before them: (previous block's number, tokens) -> number.
        self._numbers: dict[tuple[int, bytes], int] = {}
        self._next_number = _ROOT + 1
        self._held: OrderedDict[int, None] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        """Number of cached blocks."""
        return len(self._held)

    def serve(self, prompt_ids: Sequence[int], num_output_tokens: int) -> int:
        """Look up a prompt, then cache it with its answer. Returns the number of tokens that were cached.

        A hit covers whole blocks and leaves one token to compute, as in the engine. Generated tokens except the last
        one take room like the prompt, but no later prompt is assumed to continue them.
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
        """Mark blocks as used, the end first, so that no block is evicted before the blocks that continue it."""
        held = self._held
        for number in reversed(chain):
            held[number] = None
            held.move_to_end(number)
        while len(held) > self._num_blocks:
            held.popitem(last=False)
