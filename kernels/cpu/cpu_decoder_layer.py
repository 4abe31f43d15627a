"""A decoder layer on the CPU, prepared as one sequence of calls into C.

    norm │ qkv │ norm, rotate, write │ attend │ output + residual │ norm │ gate, up │ act·mul │ down + residual

Each part is a call of `cpu_row_ops.py`, `cpu_linear.py` or `cpu_attention_native.py`, so the sequence gives the same
bits as separate calls. The results that pass from part to part are in a workspace that all layers of a model share::

    token  | normed | middle | q | qkv, attended |        each area has the rows of all tokens
                                 | gate_up, inner|        the MLP reuses the memory of attention

If only some tokens' results are needed, as after a model's last layer, the second part of that layer may run for these
tokens alone, once the keys and values of all tokens are written:

    norm │ qkv │ norm, rotate, write ║ attend │ output + residual │ norm │ gate, up │ act·mul │ down + residual

In a step with low-rank adapters, each of the four products is followed by the two calls of its adapters. Such a step
computes all tokens of the last layer.

Bytes and flops: the sums over the parts.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

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
from quire.kernels.cpu.cpu_row_ops import (
    AdapterDownCall,
    AdapterUpCall,
    GatedCall,
    NormCall,
    RotateCall,
    RotatePart,
)

AdapterCalls: TypeAlias = tuple[AdapterDownCall, AdapterUpCall]


class NativeLayer(ctypes.Structure):
    """`struct layer` of native/sequence.c."""

    _fields_ = [
        ("sequence", ctypes.c_void_p),
        ("attention_norm", ctypes.c_void_p),
        ("rotate", ctypes.c_void_p),
        ("attention", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("down", ctypes.c_void_p),
        ("down_adapters", ctypes.c_void_p),
    ]


class LayerAdapters(NamedTuple):
    """The calls of the adapters of a layer's products, without addresses."""

    qkv: AdapterCalls
    output: AdapterCalls
    gate_up: AdapterCalls
    down: AdapterCalls


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The weights and options of a decoder layer, and its KV cache."""

    attention_norm: NormPart
    qkv: ProductPart
    # Norms of each head of q and of k, with the same eps. None: no norms.
    head_norms: tuple[NormPart, NormPart] | None
    num_heads: int
    scale: float
    softcap: float | None
    sinks: torch.Tensor | None  # [heads]
    output: ProductPart
    mlp_norm: NormPart
    gate_up: ProductPart
    gelu: bool  # activation: GELU (tanh form) if true, else SiLU
    down: ProductPart
    k_cache: torch.Tensor  # [blocks, kv_heads, block_size, head_dim]
    v_cache: torch.Tensor
    k_pages: torch.Tensor  # [page_rows, head_dim], a view of the cache's memory as rows
    v_pages: torch.Tensor
    adapters: LayerAdapters | None = None


@dataclass(frozen=True, slots=True)
class LayerStep:
    """The arguments of a step that all layers with the same heads, window and RoPE tables share. Made by `of`."""

    plan: NativePlan
    tables: RotatePart
    dtype: torch.dtype
    kept: tuple[torch.Tensor, ...]  # keeps alive the tensors whose addresses `tables` holds

    @classmethod
    def of(
        cls, plan: NativePlan, rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> LayerStep:
        """Check the arguments, once per step.

        Parameters
        ----------
        plan
            Attention plan of the step. Tokens beyond its own are padding. The layers run on its number of threads.
        rows, cos, sin
            Rows of the cache for each token and KV head, and the RoPE tables of each token, as for
            `cpu_row_ops.rotate_and_write`.

        Raises
        ------
        ValueError
            A shape, dtype or stride does not match.
        """
        _, kv_heads, _, head_dim = plan.cache_shape
        tables = RotatePart.of(len(cos), kv_heads, head_dim, rows, cos, sin, cos.dtype)
        return cls(plan, tables, cos.dtype, (rows, cos, sin))


@dataclass(frozen=True, slots=True)
class Selection:
    """The tokens of a step that need results, if these are not all tokens."""

    tokens: torch.Tensor  # [selected] int64, each token at most once
    plan: NativePlan  # plan of these tokens alone, in this order


def workspace_columns(
    hidden: int, num_heads: int, num_kv_heads: int, head_dim: int, intermediate: int
) -> int:
    """Workspace elements for each token of a step."""
    q = num_heads * head_dim
    inside = max(2 * q + 2 * num_kv_heads * head_dim, 3 * intermediate)
    return 2 * hidden + q + inside + 4 * ROW_GAP


class _Strides(NamedTuple):
    """Bytes between the rows of a layer's input, output and areas of the workspace."""

    hidden: int  # input and output of the layer
    normed: int  # areas `normed` and `middle`
    q: int
    qkv: int
    attended: int
    gate_up: int
    inner: int


class PreparedLayer:
    """A decoder layer with its prepared calls, run by a `LayerStack`.

    The object keeps the weights and the cache alive, but not the tensors of a step.

    Raises
    ------
    ValueError
        The parts' shapes or dtypes do not match, or the compiled library does not support them.
    """

    def __init__(self, parts: LayerParts):
        self._parts = parts
        _check_parts(parts)
        _, kv_heads, _, head_dim = parts.k_cache.shape
        heads, dtype = parts.num_heads, parts.qkv.weight.dtype
        hidden, inner = parts.qkv.weight.depth, parts.down.weight.depth
        self._hidden, self._dtype, self._q_shape = hidden, dtype, (heads, head_dim)
        q = heads * head_dim
        columns = (
            *(hidden, hidden + ROW_GAP, q, parts.qkv.weight.columns + ROW_GAP, q + ROW_GAP),
            *(2 * inner + ROW_GAP, inner + ROW_GAP),
        )
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
        self._adapters = parts.adapters
        self._set_strides()
        writing: dict[str, ctypes.Structure] = {
            "attention_norm": self._attention_norm,
            "qkv": self._qkv,
            "rotate and write": self._rotate,
        }
        reading: dict[str, ctypes.Structure] = {
            "attention": self._attention,
            "output": self._output,
            "mlp_norm": self._mlp_norm,
            "gate_up": self._gate_up,
            "gated": self._gated,
            "down": self._down,
        }
        self._sequence = CallSequence(writing | reading)
        self._halves = CallSequence(writing), CallSequence(reading)
        self._adapted = self._with_adapters(writing | reading)
        # Number of tokens, and size and address of the workspace, for which the calls' addresses are set.
        self._num_tokens = 0
        self._num_bytes = 0
        self._address = 0

    def _with_adapters(self, calls: dict[str, ctypes.Structure]) -> CallSequence | None:
        """The sequence of a step with adapters."""
        if self._adapters is None:
            return None
        all_calls: dict[str, ctypes.Structure] = {}
        for name, call in calls.items():
            all_calls[name] = call
            if name in LayerAdapters._fields:
                down, up = getattr(self._adapters, name)
                all_calls |= {f"{name} adapters, down": down, f"{name} adapters, up": up}
        return CallSequence(all_calls)

    def _set_adapters(self) -> None:
        """Let the calls of the adapters read and write where their products do."""
        if self._adapters is None:
            return
        products = (self._qkv, self._output, self._gate_up, self._down)
        for product, (down, up) in zip(products, self._adapters, strict=True):
            down.x, down.x_stride = product.x, product.x_stride
            up.out, up.out_stride = product.out, product.out_stride

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

    def layer(self, *, adapted: bool = False) -> NativeLayer:
        """The layer as a C structure; `adapted`: with the calls of adapters."""
        changing = (self._attention_norm, self._rotate, self._attention, self._output, self._down)
        addresses = [ctypes.addressof(call) for call in changing]
        if not adapted:
            return NativeLayer(self._sequence.address, *addresses, None)
        assert self._adapted is not None and self._adapters is not None
        _, up = self._adapters.down
        return NativeLayer(self._adapted.address, *addresses, ctypes.addressof(up))

    @property
    def has_adapters(self) -> bool:
        """Whether the layer can run with the calls of adapters."""
        return self._adapted is not None

    @property
    def num_calls(self) -> int:
        """Largest number of calls in the layer."""
        return len(self._sequence if self._adapted is None else self._adapted)

    @property
    def kind(self) -> tuple[object, ...]:
        """The properties that must be equal in all layers of a stack.

        Widths are included: all layers are placed in the workspace before any runs, so no layer may need a larger
        workspace than the others.
        """
        return (*self._strides, self._dtype, self._q_shape, self._parts.k_cache.shape)

    def check(self, x: torch.Tensor, step: LayerStep) -> None:
        """Raise ValueError unless x and the step match this layer."""
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
        """Raise ValueError unless the selection's plan matches its tokens and this layer."""
        selection.plan.check(len(selection.tokens), self._q_shape[0], self._parts.k_cache)

    def run_timed(
        self, x: int, out: int, step: LayerStep, isa: str | None, *, adapted: bool = False
    ) -> tuple[dict[str, float], int]:
        """Run the layer from address `x` to address `out`; return seconds by part and the rows outside the cache."""
        self._attention_norm.x = self._output.residual = x
        self._down.out = out
        self._rotate.step, self._attention.plan = step.tables, step.plan.part
        sequence = self._sequence
        if adapted:
            assert self._adapted is not None
            sequence = self._adapted
            self._set_adapters()
        seconds = sequence.run_timed(step.plan.num_threads, isa)
        return seconds, self._rotate.outside

    @property
    def selectable_work(self) -> int:
        """Multiplications that the linear layers save for each token that is not selected; attention saves more."""
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
        """Write the keys and values of all tokens, then compute the rest of the layer for the selected tokens alone.

        x is [tokens, hidden] and has passed `check`. Returns [selected, hidden] and the number of rows outside the
        cache.
        """
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
            # q is not in the workspace now: make the next step set all addresses again.
            self._num_tokens = 0
            seconds |= run_parts(reading, workspace, selection.plan.num_threads, isa)
        if workspace.on_times is not None:
            workspace.on_times(seconds)
        return out, self._rotate.outside

    @property
    def pages(self) -> torch.Tensor:
        """The keys of the cache as rows, [page_rows, head_dim]."""
        return self._parts.k_pages

    def queries(self, workspace: Workspace) -> torch.Tensor:
        """q of the last call after norm and rotation: [tokens, heads, head_dim], a view of its workspace."""
        begin = self._rotate.q_out - workspace.memory.data_ptr()
        size = self._num_tokens * self._strides.q
        q = workspace.memory[begin : begin + size].view(self._dtype)
        return q.view(self._num_tokens, *self._q_shape)

    def place(self, num_tokens: int, workspace: Workspace) -> None:
        """Set the calls' addresses in the workspace, unless the number of tokens and the workspace are unchanged."""
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
        self._set_adapters()

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
