"""Fused layers on the CPU: a layer is one call into the compiled library if all its weights are packed.

```
 norm │ qkv │ norm, rotate, write │ attend │ o + residual │ norm │ gate, up │ act·mul │ down + residual
```

A chain of such layers is one call, too (`kernels/cpu/cpu_layer_stack.py`). The last layer may skip tokens whose results
are not read afterwards.
"""

from __future__ import annotations

import torch

from quire.kernels.cpu import cpu_attention_native
from quire.kernels.cpu.cpu_decoder_layer import (
    LayerAdapters,
    LayerParts,
    PreparedLayer,
    Selection,
)
from quire.kernels.cpu.cpu_layer_stack import LayerStack
from quire.kernels.cpu.cpu_lm_head import NormedProduct
from quire.replica.device.kv_pool import KVPool
from quire.replica.model.attention import RanAhead, Tables
from quire.replica.model.cpu_step_context import CpuStepContext
from quire.replica.model.fusion.cpu_fused_parts import PackedProduct, norm_part
from quire.replica.model.fusion.fused_layer import FusedDecoder, FusedLayer

# Tokens are skipped only if this saves at least this number of multiplications. They take about 0.3 ms, and so do the
# additional attention plan and two calls that skipping needs.
_MIN_WORK_SAVED = 2**28


class CpuLayer(FusedLayer):
    """`FusedLayer` on the CPU."""

    # A KV pool, and the layer as one call on this pool; None in place of the call if some part does not allow it.
    _sequence: tuple[KVPool, PreparedLayer | None] | None = None
    # Whether all later operations work on each token separately, so that tokens which are not read may be skipped.
    is_last = False
    # The calls of adapters in steps that have some; None: the engine has no adapters.
    adapters: LayerAdapters | None = None
    _stack: LayerStack | None = None

    def run(self, x: torch.Tensor, tables: Tables, step: CpuStepContext) -> torch.Tensor:
        """See `FusedLayer.run`."""
        if step.workspace is not None and self.sequence(step.pool) is not None:
            return self.run_chained(x, tables, step)
        # Attention's output projection and the MLP's down projection add the residual.
        middle, _ = self.attention(self.attention_norm(x), tables, residual=x, quire=step)
        return self.mlp(self.mlp_norm(middle), middle)

    def runs_chained(self, pool: KVPool) -> bool:
        """Whether the layer is one call."""
        return self.sequence(pool) is not None

    def runs_like(self, other: FusedLayer, pool: KVPool) -> bool:
        """Whether both layers have the same layer group and the same kind of call."""
        groups = {pool.group_of(layer.attention.facts.layer) for layer in (self, other)}
        kinds = {layer.sequence(pool).kind for layer in (self, other)}
        return len(groups) == len(kinds) == 1

    def forget_sequence(self) -> None:
        """Drop references to the packed weights, which are about to change."""
        self._sequence = self._stack = None

    def sequence(self, pool: KVPool) -> PreparedLayer | None:
        """Return the layer as one call into the compiled library; None if some part does not allow it."""
        if self._sequence is None or self._sequence[0] is not pool:
            self._sequence = pool, self._make_sequence(pool)
        return self._sequence[1]

    def selection(self, step: CpuStepContext) -> Selection | None:
        """Return the tokens to compute in this layer, if skipping the others saves time; None: all."""
        if not self.is_last or step.selected is None or step.adapters is not None:
            return None
        left_out = int(step.cu_q[-1]) - len(step.selected)
        prepared = self.sequence(step.pool)
        assert prepared is not None
        if left_out * prepared.selectable_work < _MIN_WORK_SAVED:
            return None
        return step.selection(step.pool.group_of(self.attention.facts.layer))

    def _make_sequence(self, pool: KVPool) -> PreparedLayer | None:
        attention, mlp = self.attention, self.mlp
        facts = attention.facts
        k_cache = pool.keys(facts.layer)
        products = (attention.qkv, attention.output, mlp.gate_up, mlp.down)
        if not all(isinstance(product, PackedProduct) for product in products):
            return None
        if not cpu_attention_native.supports(k_cache, facts.num_heads):
            return None
        qkv, output, gate_up, down = (product.part() for product in products)
        k_pages, v_pages = pool.pages(facts.layer)
        norms = attention.norms
        return PreparedLayer(
            LayerParts(
                attention_norm=norm_part(self.attention_norm.weight),
                qkv=qkv,
                head_norms=None if norms is None else (norm_part(norms[0]), norm_part(norms[1])),
                num_heads=facts.num_heads,
                scale=facts.scaling,
                softcap=facts.softcap,
                sinks=facts.sinks,
                output=output,
                mlp_norm=norm_part(self.mlp_norm.weight),
                gate_up=gate_up,
                gelu=mlp.activation == "gelu_tanh",
                down=down,
                k_cache=k_cache,
                v_cache=pool.values(facts.layer),
                k_pages=k_pages,
                v_pages=v_pages,
                adapters=self.adapters,
            )
        )

    def run_chained(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Tables,
        step: CpuStepContext,
    ) -> torch.Tensor:
        """Run the chain as one call. `sequence` must not be None for any of its layers."""
        assert step.workspace is not None
        facts = self.attention.facts
        tables = step.layer_step(step.pool.group_of(facts.layer), position_embeddings)
        chain = self._called(step)
        sequences = tuple(layer.sequence(step.pool) for layer in chain)
        if self._stack is None or self._stack.layers != sequences:
            self._stack = LayerStack(sequences)
        selection = chain[-1].selection(step)
        x = hidden_states.contiguous()
        adapted = step.adapters is not None
        out = self._stack(x, tables, step.workspace, selection=selection, adapted=adapted)
        step.ran_ahead = RanAhead(chain[1:], out, position_embeddings)
        if step.on_attend is not None:
            q = sequences[0].queries(step.workspace)
            step.on_attend(facts.layer, q, facts.scaling, facts.softcap, facts.sinks)
        return out


class CpuDecoder(FusedDecoder):
    """`FusedDecoder` on the CPU.

    Attributes
    ----------
    head
        Last norm and output head as one call, for results of `before_norm`; None if they cannot be one call.
    """

    head: NormedProduct | None = None

    def runs_whole(self, step: CpuStepContext) -> bool:
        """See `FusedDecoder.runs_whole`."""
        return step.on_attend is None and step.workspace is not None

    def run(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: CpuStepContext
    ) -> torch.Tensor:
        """See `FusedDecoder.run`."""
        x = self.before_norm(token_ids[0], positions[0], step)
        return self.last_norm(x)[None]

    def before_norm(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: CpuStepContext
    ) -> torch.Tensor:
        """Run everything before the last norm: token ids and positions [T] to [T, hidden]; needs `step.workspace`."""
        _, embedding, rotation, first, _ = self._parts
        x = embedding(token_ids)
        return first.run_chained(x, rotation(x[None], positions[None]), step)
