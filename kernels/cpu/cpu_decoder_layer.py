"""A decoder layer on the CPU, prepared as one sequence of calls into C.

    norm │ qkv │ norm, rotate, write │ attend │ output + residual │ norm │ gate, up │ act·mul │ down + residual

Each part is the call of `cpu_row_ops.py`, `cpu_linear.py` or `cpu_attention_native.py`, so a row has the bits that the
calls one by one give it. What passes from part to part lies in a workspace that all layers of a model share::

    token  | normed | middle | q | qkv, attended |        elements of all tokens side by side
                                 | gate_up, inner|        of the MLP, in place of the attention's

Where only some tokens' results are read, as after a model's last layer, that layer may run for these alone once the
keys and values of all are written:

    norm │ qkv │ norm, rotate, write ║ attend │ output + residual │ norm │ gate, up │ act·mul │ down + residual

Bytes: those of the parts.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import NamedTuple

import torch

from quire.kernels.cpu import cpu_attention, cpu_attention_native
from quire.kernels.cpu.cpu_attention_native import AttentionCall, NativePlan
from quire.kernels.cpu.cpu_call_sequence import (
    ROW_GAP,
    CallSequence,
    NormPart,
    ProductPart,
    Workspace,
    aligned,
    run_parts,
)
from quire.kernels.cpu.cpu_linear import LinearCall
from quire.kernels.cpu.cpu_row_ops import GatedCall, NormCall, RotateCall, RotatePart


class NativeLayer(ctypes.Structure):
    """`struct layer` of native/sequence.c."""

    _fields_ = [
        ("sequence", ctypes.c_void_p),
        ("attention_norm", ctypes.c_void_p),
        ("rotate", ctypes.c_void_p),
        ("attention", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("down", ctypes.c_void_p),
    ]


@dataclass(frozen=True, slots=True)
class LayerParts:
    """What a decoder layer is made of, and where its keys and values lie."""

    attention_norm: NormPart
    qkv: ProductPart
    head_norms: tuple[NormPart, NormPart] | None  # of each head of q and of k, with the same eps
    num_heads: int
    scale: float
    softcap: float | None
    sinks: torch.Tensor | None  # [heads]
    output: ProductPart
    mlp_norm: NormPart
    gate_up: ProductPart
    gelu: bool  # the activation, as in `cpu_row_ops.gated`
    down: ProductPart
    k_cache: torch.Tensor  # [blocks, kv_heads, block_size, head_dim] as `cpu_attention` takes it
    v_cache: torch.Tensor
    k_pages: torch.Tensor  # [page_rows, head_dim] of the same memory, as `cpu_row_ops` writes it
    v_pages: torch.Tensor


@dataclass(frozen=True, slots=True)
class LayerStep:
    """What a step tells its layers: those with the same heads, window and rotation. See `of`."""

    plan: NativePlan
    tables: RotatePart
    dtype: torch.dtype
    kept: tuple[torch.Tensor, ...]  # which `tables` points to

    @classmethod
    def of(
        cls, plan: NativePlan, rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> LayerStep:
        """Check it, once a step.

        Parameters
        ----------
        plan
            Of the step's tokens; those after the last of its own only pad. Its threads run the layers.
        rows, cos, sin
            As in `cpu_row_ops.rotate_and_write`.

        Raises
        ------
        ValueError
            A shape, dtype or stride that does not fit.
        """
        _, kv_heads, _, head_dim = plan.cache_shape
        tables = RotatePart.of(len(cos), kv_heads, head_dim, rows, cos, sin, cos.dtype)
        return cls(plan, tables, cos.dtype, (rows, cos, sin))


@dataclass(frozen=True, slots=True)
class Selection:
    """The tokens of a step whose results are read, where that is not all of them."""

    tokens: torch.Tensor  # [selected] int64, each at most once
    plan: NativePlan  # of these alone, in this order


def workspace_columns(
    hidden: int, num_heads: int, num_kv_heads: int, head_dim: int, intermediate: int
) -> int:
    """Elements of the workspace for each token of a step."""
    q = num_heads * head_dim
    inside = max(2 * q + 2 * num_kv_heads * head_dim, 3 * intermediate)
    return 2 * hidden + q + inside + 4 * ROW_GAP


class _Strides(NamedTuple):
    """Bytes between the rows of what a layer reads, writes and keeps in the workspace."""

    hidden: int  # what goes in and comes out
    normed: int  # and what is between attention and MLP
    q: int
    qkv: int
    attended: int
    gate_up: int
    inner: int


class PreparedLayer:
    """A layer, prepared, to be run by a `LayerStack`. It keeps its parts alive, and of a step nothing.

    Raises
    ------
    ValueError
        Parts that do not fit each other, or that the compiled library does not serve.
    """

    def __init__(self, parts: LayerParts):
        self._parts = parts
        _check_parts(parts)
        _, kv_heads, _, head_dim = parts.k_cache.shape
        heads, dtype = parts.num_heads, parts.qkv.weight.dtype
        hidden, inner = parts.qkv.weight.depth, parts.down.weight.depth
        self._hidden, self._dtype, self._q_shape = hidden, dtype, (heads, head_dim)
        q = heads * head_dim
        columns = hidden, hidden + ROW_GAP, q, parts.qkv.weight.columns + ROW_GAP, q + ROW_GAP
        columns += 2 * inner + ROW_GAP, inner + ROW_GAP
        self._strides = _Strides(*(count * dtype.itemsize for count in columns))
        q_norm, k_norm = (None, None) if parts.head_norms is None else parts.head_norms
        self._sinks = None if parts.sinks is None else parts.sinks.detach().float().contiguous()

        self._attention_norm = NormCall.of(
            parts.attention_norm.weight, hidden, dtype, parts.attention_norm.eps
        )
        self._qkv = LinearCall.of(*parts.qkv)
        self._rotate = RotateCall.of(
            heads,
            kv_heads,
            parts.k_pages,
            parts.v_pages,
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
            0.0 if q_norm is None else q_norm.eps,
        )
        self._attention = AttentionCall.of(
            parts.k_cache, parts.v_cache, heads, parts.scale, parts.softcap, self._sinks
        )
        self._output = LinearCall.of(*parts.output)
        self._mlp_norm = NormCall.of(parts.mlp_norm.weight, hidden, dtype, parts.mlp_norm.eps)
        self._gate_up = LinearCall.of(*parts.gate_up)
        self._gated = GatedCall.of(inner, dtype, parts.gelu)
        self._down = LinearCall.of(*parts.down)
        self._set_strides()
        writing = {
            "attention_norm": self._attention_norm,
            "qkv": self._qkv,
            "rotate and write": self._rotate,
        }
        reading = {
            "attention": self._attention,
            "output": self._output,
            "mlp_norm": self._mlp_norm,
            "gate_up": self._gate_up,
            "gated": self._gated,
            "down": self._down,
        }
        self._sequence = CallSequence(writing | reading)
        self._halves = CallSequence(writing), CallSequence(reading)
        self._num_tokens = 0  # that the calls are set to, like the next two
        self._num_bytes = 0
        self._address = 0

    def _set_strides(self) -> None:
        strides = self._strides
        for call, x, out in (
            (self._attention_norm, strides.hidden, strides.normed),
            (self._qkv, strides.normed, strides.qkv),
            (self._output, strides.attended, strides.normed),
            (self._mlp_norm, strides.normed, strides.normed),
            (self._gate_up, strides.normed, strides.gate_up),
            (self._gated, strides.gate_up, strides.inner),
            (self._down, strides.inner, strides.hidden),
        ):
            call.x_stride, call.out_stride = x, out
        self._output.residual_stride, self._down.residual_stride = strides.hidden, strides.normed
        self._rotate.qkv_stride = strides.qkv
        heads, head_dim = self._q_shape
        self._attention.q_token_stride, self._attention.q_head_stride = heads * head_dim, head_dim
        self._attention.out_token_stride = strides.attended // self._dtype.itemsize

    @property
    def layer(self) -> NativeLayer:
        """What C is told of it."""
        return NativeLayer(
            self._sequence.address,
            *map(
                ctypes.addressof,
                (self._attention_norm, self._rotate, self._attention, self._output, self._down),
            ),
        )

    @property
    def num_calls(self) -> int:
        """That it is made of."""
        return len(self._sequence)

    @property
    def kind(self) -> tuple[object, ...]:
        """What layers of a stack have in common, beside a step's plan and tables.

        Their widths too: they are placed before any runs, so none may make the workspace grow after another's place.
        """
        return (*self._strides, self._dtype, self._q_shape, self._parts.k_cache.shape)

    def check(self, x: torch.Tensor, step: LayerStep) -> None:
        """Raise ValueError where x or the step do not fit."""
        num_tokens = step.tables.tokens
        if (
            x.shape[-1] != self._hidden
            or x.numel() != num_tokens * self._hidden
            or x.dtype != self._dtype
            or not x.is_contiguous()
            or x.device.type != "cpu"
        ):
            raise ValueError(
                f"x: must be [..., {self._hidden}] {self._dtype} of {num_tokens} tokens, contiguous, got "
                f"{list(x.shape)} {x.dtype} on {x.device}, strides {x.stride()}"
            )
        if step.dtype != self._dtype:
            raise ValueError(f"step: must have tables of {self._dtype}, got {step.dtype}")
        step.plan.check(num_tokens, self._q_shape[0], self._parts.k_cache)

    def check_selection(self, selection: Selection) -> None:
        """Raise ValueError where its plan is not of its tokens."""
        selection.plan.check(len(selection.tokens), self._q_shape[0], self._parts.k_cache)

    def run_timed(
        self, x: int, out: int, step: LayerStep, isa: str | None
    ) -> tuple[dict[str, float], int]:
        """From the address of what goes in to that of what comes out: seconds by part, and rows outside the pages."""
        self._attention_norm.x = self._output.residual = x
        self._down.out = out
        self._rotate.step, self._attention.plan = step.tables, step.plan.part
        seconds = self._sequence.run_timed(step.plan.num_threads, isa)
        return seconds, self._rotate.outside

    @property
    def selectable_work(self) -> int:
        """Multiplications that the products save for each token that is not selected; attention saves more."""
        products = (self._parts.output, self._parts.gate_up, self._parts.down)
        return sum(weight.columns * weight.depth for weight, _ in products)

    def run_selected(
        self,
        x: torch.Tensor,
        step: LayerStep,
        selection: Selection,
        workspace: Workspace,
        isa: str | None,
    ) -> tuple[torch.Tensor, int]:
        """[selected, hidden] from x [tokens, hidden], which `check` has taken; and rows outside the pages."""
        writing, reading = self._halves
        self.place(len(x), workspace)
        self._attention_norm.x = x.data_ptr()
        self._rotate.step = step.tables
        seconds = run_parts(writing, workspace, step.plan.num_threads, isa)
        q, residual = self.queries(workspace)[selection.tokens], x[selection.tokens]
        out = torch.empty_like(residual)
        if len(out):
            self.place(len(out), workspace)
            self._attention.q, self._attention.plan = q.data_ptr(), selection.plan.part
            self._output.residual, self._down.out = residual.data_ptr(), out.data_ptr()
            self._num_tokens = (
                0  # q is none of the workspace's: the next step places all of it again
            )
            seconds |= run_parts(reading, workspace, selection.plan.num_threads, isa)
        if workspace.on_times is not None:
            workspace.on_times(seconds)
        return out, self._rotate.outside

    @property
    def pages(self) -> torch.Tensor:
        """[page_rows, head_dim] of the keys."""
        return self._parts.k_pages

    def queries(self, workspace: Workspace) -> torch.Tensor:
        """q of the last call, normed and rotated: [tokens, heads, head_dim] view of the workspace it was given."""
        begin = self._rotate.q_out - workspace.memory.data_ptr()
        size = self._num_tokens * self._strides.q
        q = workspace.memory[begin : begin + size].view(self._dtype)
        return q.view(self._num_tokens, *self._q_shape)

    def place(self, num_tokens: int, workspace: Workspace) -> None:
        """Point the calls to the workspace; nothing to do while steps have the same number of tokens."""
        if num_tokens == self._num_tokens and workspace.reserve(self._num_bytes) == self._address:
            return
        _, normed_bytes, q, qkv, attended, gate_up_bytes, inner = (
            aligned(num_tokens * stride) for stride in self._strides
        )
        num_bytes = 2 * normed_bytes + q + max(qkv + attended, gate_up_bytes + inner)
        address = workspace.reserve(num_bytes)
        self._num_bytes, self._address = num_bytes, address
        self._set_tokens(num_tokens)
        normed, middle = address, address + normed_bytes
        queries = middle + normed_bytes
        mixed = gate_up = queries + q
        self._attention_norm.out = self._mlp_norm.out = normed
        self._qkv.x = self._gate_up.x = normed
        self._qkv.out = self._rotate.qkv = mixed
        self._rotate.q_out = self._attention.q = queries
        self._attention.out = self._output.x = mixed + qkv
        self._output.out = self._mlp_norm.x = self._down.residual = middle
        self._gate_up.out = self._gated.x = gate_up
        self._gated.out = self._down.x = gate_up + gate_up_bytes

    def _set_tokens(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        for call in (
            self._attention_norm,
            self._qkv,
            self._output,
            self._mlp_norm,
            self._gate_up,
            self._gated,
            self._down,
        ):
            call.rows = num_tokens


def _check_parts(parts: LayerParts) -> None:
    _, kv_heads, _, head_dim = parts.k_cache.shape
    heads, dtype = parts.num_heads, parts.qkv.weight.dtype
    hidden, inner = parts.qkv.weight.depth, parts.down.weight.depth
    for name, (weight, _), shape in (
        ("qkv", parts.qkv, ((heads + 2 * kv_heads) * head_dim, hidden)),
        ("output", parts.output, (hidden, heads * head_dim)),
        ("gate_up", parts.gate_up, (2 * inner, hidden)),
        ("down", parts.down, (hidden, inner)),
    ):
        found = (weight.columns, weight.depth)
        if found != shape or weight.dtype != dtype:
            raise ValueError(
                f"{name}: must be {list(shape)} {dtype}, got {list(found)} {weight.dtype}"
            )
    cpu_attention.check(torch.empty(0, heads, head_dim, dtype=dtype), parts.k_cache, parts.v_cache)
    if not cpu_attention_native.supports(parts.k_cache, heads):
        raise ValueError(f"k_cache: must have {cpu_attention_native.LIMITS}")
    if parts.k_pages.shape[1:] != (head_dim,) or parts.k_pages.dtype != dtype:
        raise ValueError(
            f"k_pages: must be [page_rows, {head_dim}] {dtype}, got {list(parts.k_pages.shape)} {parts.k_pages.dtype}"
        )
    if parts.sinks is not None and parts.sinks.shape != (heads,):
        raise ValueError(f"sinks: must be [{heads}], got {list(parts.sinks.shape)}")
