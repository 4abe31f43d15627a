"""Decoder layers on the CPU as one call into C: their parts run in order on a team of threads, with barriers between.

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
    """Layers that run one after the other, each on what the one before it made.

    Raises
    ------
    ValueError
        None, layers of different shapes, or one of them twice: its calls serve one place.
    """

    def __init__(self, layers: Collection[PreparedLayer]):
        if len({layer.kind for layer in layers}) != 1:
            raise ValueError("layers: must have one shape, dtype and cache, got several or none")
        if len(set(map(id, layers))) < len(layers):
            raise ValueError("layers: must each be another, got one twice")
        self._layers = tuple(layers)
        self._library = native_library.load()
        self._array = (NativeLayer * len(layers))(*(layer.layer for layer in layers))
        num_bytes = sum(layer.num_calls for layer in layers)
        num_bytes *= self._library.functions.quire_stage_bytes()
        self._stages = torch.empty(num_bytes + ALIGNMENT_BYTES, dtype=torch.uint8)

    @property
    def layers(self) -> tuple[PreparedLayer, ...]:
        """In order."""
        return self._layers

    def __call__(
        self,
        x: torch.Tensor,
        step: LayerStep,
        workspace: Workspace,
        *,
        selection: Selection | None = None,
        isa: str | None = None,
    ) -> torch.Tensor:
        """Write the keys and values of a step's tokens, and attend, in every layer.

        Parameters
        ----------
        x
            [..., hidden] of the step's tokens in the weights' dtype, contiguous.
        step
            Of the layers' heads, window and rotation.
        selection
            Of the last layer: other tokens keep what it was given for them. None: all tokens.
        isa
            As in `cpu_linear.packed_linear`.

        Returns
        -------
        [..., hidden] as x, in memory of its own.

        Raises
        ------
        ValueError
            A shape, dtype or stride that does not fit, or a step of another number of tokens or other heads.
        IndexError
            A row that the pages do not have.
        """
        last = self._layers[-1]
        last.check(x, step)
        if selection is not None:
            last.check_selection(selection)
        if not step.tables.tokens:
            return torch.empty_like(x)
        whole = len(self._layers) - (selection is not None)  # layers that run for all tokens
        out = torch.empty_like(x) if whole else x.clone()
        outside = self._run(whole, x, out, step, workspace, isa)
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
    ) -> int:
        """The first `count` layers; returns the rows that the pages do not have."""
        for layer in self._layers[:count]:
            layer.place(step.tables.tokens, workspace)
        if workspace.on_times is None:
            library = self._library
            return library.functions.quire_layers(
                self._array,
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
            seconds, more = layer.run_timed(goes_in, out.data_ptr(), step, isa)
            workspace.on_times(seconds)
            outside, goes_in = outside + more, out.data_ptr()
        return outside
