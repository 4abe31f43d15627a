"""The key of a captured graph."""

from __future__ import annotations

import enum
from typing import NamedTuple


class GraphPart(enum.Enum):
    """How much of a step a graph holds."""

    WHOLE = "step"  # from the last tokens to the next ones
    FORWARD = "forward"  # to the logits; the draw depends on the host


class GraphKey(NamedTuple):
    """The shape of a captured step."""

    num_rows: int  # with padding
    part: GraphPart
    num_tokens: int = 0  # of a mixed step, with padding; 0: every row decodes
    kv_tokens: int = 0  # of a mixed step: tokens that the gathered block tables hold; 0: all

    @property
    def is_mixed(self) -> bool:
        """Whether rows may have more than one query token."""
        return self.num_tokens > 0

    def __str__(self) -> str:
        if not self.is_mixed:
            return f"a decode {self.part.value} of {self.num_rows} rows"
        return (
            f"a mixed {self.part.value} of {self.num_tokens} tokens in {self.num_rows} rows of at most "
            f"{self.kv_tokens}"
        )
