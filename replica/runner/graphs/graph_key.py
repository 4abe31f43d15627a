"""The key of a captured graph."""

from __future__ import annotations

import enum
from typing import NamedTuple


class GraphPart(enum.Enum):
    """The part of a step that a graph contains."""

    WHOLE = "step"  # forward pass and sampling
    FORWARD = "forward"  # up to the logits; sampling needs data that the host prepares later


class GraphKey(NamedTuple):
    """The shape of a captured step."""

    num_rows: int  # with padding
    part: GraphPart
    num_tokens: int = 0  # of a mixed step, with padding; 0: every row decodes
    # Only of a mixed step: longest row in tokens, which bounds the gathered block tables; 0: every row decodes.
    kv_tokens: int = 0
    is_adapted: bool = False  # whether rows may have adapters

    @property
    def is_mixed(self) -> bool:
        """Whether rows may have more than one query token."""
        return self.num_tokens > 0

    def __str__(self) -> str:
        adapted = " with adapters" if self.is_adapted else ""
        if not self.is_mixed:
            return f"a decode {self.part.value} of {self.num_rows} rows{adapted}"
        return (
            f"a mixed {self.part.value} of {self.num_tokens} tokens in {self.num_rows} rows of at most "
            f"{self.kv_tokens}{adapted}"
        )
