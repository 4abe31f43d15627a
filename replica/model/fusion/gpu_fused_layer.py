"""Fused layers on a GPU. The result of attention or MLP is added to the residual stream by the norm that follows it.

```
 residual + norm │ qkv │ norm, rotate, write │ attend │ o │ residual + norm │ gate, up │ act·mul │ down
```
"""

from __future__ import annotations

import torch

from quire.replica.device.kv_pool import KVPool
from quire.replica.model.attention import RanAhead, StepContext, Tables
from quire.replica.model.fusion.fused_layer import FusedDecoder, FusedLayer


class GpuLayer(FusedLayer):
    """`FusedLayer` on a GPU."""

    def run(self, x: torch.Tensor, tables: Tables, step: StepContext) -> torch.Tensor:
        """See `FusedLayer.run`."""
        x, addend = self.run_unsummed(x, tables, step)
        out = x + addend
        step.ran_ahead = RanAhead(self._called(step)[1:], out, tables)
        return out

    def run_unsummed(
        self, x: torch.Tensor, tables: Tables, step: StepContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the chain on x [1, T, hidden]. Return two tensors of this shape; their sum is the result."""
        addend = None
        for layer in self._called(step):
            if addend is None:
                normed = layer.attention_norm(x)
            else:
                normed, x = layer.attention_norm.add(addend, x)
            mixed, _ = layer.attention(normed, tables, quire=step)
            normed, x = layer.mlp_norm.add(mixed, x)
            addend = layer.mlp(normed)
        return x, addend

    def runs_chained(self, pool: KVPool) -> bool:
        """Return True: every layer may be part of a chain."""
        return True

    def runs_like(self, other: FusedLayer, pool: KVPool) -> bool:
        """Return True: any layers may be in one chain."""
        return True


class GpuDecoder(FusedDecoder):
    """`FusedDecoder` on a GPU. The last norm is a `GpuNorm`; it adds the last layer's MLP result to the residual."""

    def run(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: StepContext
    ) -> torch.Tensor:
        """See `FusedDecoder.run`."""
        _, embedding, rotation, first, norm = self._parts
        x = embedding(token_ids)
        x, addend = first.run_unsummed(x, rotation(x, positions), step)
        normed, _ = norm.add(addend, x)
        return normed
