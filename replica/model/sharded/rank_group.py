"""The ranks of a tensor-parallel replica, and sums over them in a fixed order.

Each rank adds its own partial sums in a binary tree. Then every rank gets the results of all ranks and adds them in the
same tree, so all ranks have the same bits:

```
 parts      p0   p1   p2   p3      of `reduction_splits`, here 4
 2 ranks    └─┬──┘    └─┬──┘       each rank adds its own parts
 all-gather   └────┬────┘          then both add the two sums
```

The tree depends on the number of parts only. One, two and four ranks that add four parts therefore give equal bits.
(Gloo's all-reduce chooses an order by the number of ranks and elements.)

Cost: each rank receives the sums of all other ranks, where an all-reduce sends about two of them. On GPUs the ranks
therefore use NCCL's all-reduce, in an order of its own, unless the engine is `deterministic`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

# Loading may take this long on one rank while another one waits for it. A step that hangs is found by the leader.
_WAIT = timedelta(hours=1)
# NCCL does not notice that a rank has ended, so that this is also how long the others wait for it while they start.
_WAIT_FOR_GPU = timedelta(minutes=10)


def tree_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add tensors of equal shape in a binary tree of neighbours; their number is a power of two."""
    rest = list(parts)
    while len(rest) > 1:
        rest = [left + right for left, right in zip(rest[::2], rest[1::2], strict=True)]
    return rest[0]


class RankGroup:
    """This process among the ranks of its replica. Every rank must make the same calls in the same order.

    Parameters
    ----------
    rank, size
        Number of this rank, and number of ranks.
    backend
        A process group of `torch.distributed`; None for a single rank.
    device
        cpu or cuda: where the tensors are.
    fixed_order
        Whether sums are those of the tree above.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        backend: Any = None,
        device: str = "cpu",
        fixed_order: bool = True,
    ):
        self.rank = rank
        self.size = size
        self._backend = backend
        self._device = device
        self._fixed_order = fixed_order

    @classmethod
    def join(
        cls, store_path: Path, rank: int, size: int, device: str = "cpu", fixed_order: bool = True
    ) -> RankGroup:
        """Connect to the other ranks on this machine; they meet by the file `store_path`.

        On GPUs each rank's process has one as its current device, and the file must remain.
        """
        from torch import distributed

        store = distributed.FileStore(str(store_path), size)
        if device == "cuda":
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # as below
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = _WAIT_FOR_GPU
            backend = distributed.ProcessGroupNCCL(store, rank, size, options)
            return cls(rank, size, backend, device, fixed_order)
        options = distributed.ProcessGroupGloo._Options()
        # Ranks share a machine, so that no other one needs to reach their sockets.
        options._devices = [distributed.ProcessGroupGloo.create_device(interface="lo")]
        options._timeout = _WAIT
        # Gloo's own sums fix no order.
        return cls(rank, size, distributed.ProcessGroupGloo(store, rank, size, options))

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks, in their order; they have equal shapes."""
        if self.size == 1 or not x.numel():
            return [x] * self.size
        parts = x.new_empty(self.size * x.numel())
        self._backend._allgather_base(parts, x.reshape(-1)).wait()
        return list(parts.view(self.size, *x.shape))

    def gather_to_first(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        """Return the tensors of all ranks, in their order, on the first rank; None on the others."""
        if self.size == 1 or not x.numel():
            return [x] * self.size
        from torch import distributed

        x = x.contiguous()
        options = distributed.GatherOptions()
        options.rootRank = 0
        if self.rank:
            self._backend.gather([], [x], options).wait()
            return None
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._backend.gather([parts], [x], options).wait()
        return parts

    def sum(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Add the partial sums of all ranks; each rank gives equally many, in order."""
        own = tree_sum(parts)
        if self._fixed_order or self.size == 1 or not own.numel():
            return tree_sum(self.gather(own))
        own = own.contiguous()
        self._backend.allreduce([own]).wait()
        return own

    def copy_from_first(self, x: torch.Tensor) -> None:
        """Overwrite `x`, of equal shape on all ranks, with the first rank's."""
        if self.size == 1 or not x.numel():
            return
        self._backend.broadcast(x, 0).wait()

    def abort(self) -> None:
        """End calls on a GPU that wait for a rank which has ended; Gloo's end by themselves."""
        if self._device == "cuda":
            self._backend.abort()

    def worst(self, result: int) -> int:
        """Return the largest result of all ranks."""
        return int(self.largest(float(result)))

    def wait_for_all(self) -> None:
        """Wait until every rank has made this call."""
        self.largest(0.0)

    def largest(self, value: float) -> float:
        """Return the largest value of all ranks; NaN if one is NaN."""
        own = torch.tensor(value, dtype=torch.float64, device=self._device)
        return float(torch.stack(self.gather(own)).max())
