"""Decoder layers on the CPU as one call into C: a team of threads runs their parts in order, with barriers between.

norm │ qkv │ norm, rotate, write │ attend │ output + residual │ norm │ gate, up │ act·mul │ down + residual ┐
  ┌───────────────────────────────────── the next layer, in the same team ◀─────────────────────────────────┘
norm │ ...
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection

import torch

from quire.kernels.cpu import native_library
from quire.kernels.cpu.cpu_call_sequence import ALIGNMENT_BYTES, Workspace, aligned
from quire.kernels.cpu.cpu_decoder_layer import LayerStep, NativeLayer, PreparedLayer, Selection


class LayerStack:
    """Layers that run one after the other, each on the result of the previous one.

    Raises
    ------
    ValueError
        There are no layers, layers of different shapes, or one layer occurs twice.
    """

    def __init__(self, layers: Collection[PreparedLayer]):
        if len({layer.kind for layer in layers}) != 1:
            raise ValueError("layers: must have one shape, dtype and cache, got several or none")
        if len(set(map(id, layers))) < len(layers):
            raise ValueError("layers: must be distinct, got one twice")
        self._layers = tuple(layers)
        self._library = native_library.installed()
        self._array = (NativeLayer * len(layers))(*(layer.layer() for layer in layers))
        # None: some layer cannot run with adapters.
        self._adapted: ctypes.Array[NativeLayer] | None = None
        if all(layer.has_adapters for layer in layers):
            adapted = (layer.layer(adapted=True) for layer in layers)
            self._adapted = (NativeLayer * len(layers))(*adapted)
        num_bytes = sum(layer.num_calls for layer in layers)
        num_bytes *= self._library.functions.quire_stage_bytes()
        self._stages = torch.empty(num_bytes + ALIGNMENT_BYTES, dtype=torch.uint8)

    @property
    def layers(self) -> tuple[PreparedLayer, ...]:
        """The layers in order."""
        return self._layers

    def __call__(
        self,
        x: torch.Tensor,
        step: LayerStep,
        workspace: Workspace,
        *,
        selection: Selection | None = None,
        isa: str | None = None,
        adapted: bool = False,
    ) -> torch.Tensor:
        """Run all layers for a step's tokens; their keys and values are written to the cache.

        Parameters
        ----------
        x
            [..., hidden] of the step's tokens in the weights' dtype, contiguous.
        step
            The step's arguments for layers with these heads, window and rotation.
        workspace
            Memory for the layers' intermediate results.
        selection
            Tokens for which the last layer is computed in full. For other tokens the result is the last layer's input.
            None: all tokens.
        isa
            Instruction set, one of `native_library.ISAS`; None: the best of this processor.
        adapted
            Run the calls of the layers' adapters (`LayerParts.adapters`) too; not with a selection.

        Returns
        -------
        [..., hidden] in the shape and dtype of x, in new memory.

        Raises
        ------
        ValueError
            A shape, dtype or stride does not match, or the step has another number of tokens or other heads.
        IndexError
            A row is outside the cache.
        """
        last = self._layers[-1]
        last.check(x, step)
        if adapted and (self._adapted is None or selection is not None):
            raise ValueError("adapted: needs layers with adapters, and no selection")
        if selection is not None:
            last.check_selection(selection)
        if not step.tables.tokens:
            return torch.empty_like(x)
        # Number of layers that run for all tokens.
        whole = len(self._layers) - (selection is not None)
        out = torch.empty_like(x) if whole else x.clone()
        outside = self._run(whole, x, out, step, workspace, isa, adapted)
        if selection is not None:
            rows = out.view(-1, x.shape[-1])
            selected, more = last.run_selected(rows, step, selection, workspace, isa)
            rows[selection.tokens] = selected
            outside += more
        if outside:
            raise IndexError(f"rows: {outside} are not between 0 and {len(last.pages) - 1}")
        return out

    def _run(
        self,
        count: int,
        x: torch.Tensor,
        out: torch.Tensor,
        step: LayerStep,
        workspace: Workspace,
        isa: str | None,
        adapted: bool,
    ) -> int:
        """Run the first `count` layers; return the number of rows outside the cache."""
        for layer in self._layers[:count]:
            layer.place(step.tables.tokens, workspace)
        if workspace.on_times is None:
            library = self._library
            return library.functions.quire_layers(
                self._adapted if adapted else self._array,
                count,
                x.data_ptr(),
                out.data_ptr(),
                ctypes.byref(step.tables),
                ctypes.byref(step.plan.part),
                aligned(self._stages.data_ptr()),
                library.isa(isa),
                library.parallel,
                step.plan.num_threads,
            )
        outside, goes_in = 0, x.data_ptr()
        for layer in self._layers[:count]:
            seconds, more = layer.run_timed(goes_in, out.data_ptr(), step, isa, adapted=adapted)
            workspace.on_times(seconds)
            outside, goes_in = outside + more, out.data_ptr()
        return outside
