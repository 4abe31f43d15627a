"""The operations of a decoder layer between its GEMMs, on the CPU in C. Each makes one pass over the rows.

    rms_norm              y = x / sqrt(mean(x^2) + eps) * weight
    gated                 y = act(gate) * up, from rows [gate | up]
    rotate_and_write      norms each head of q and k, rotates it, and writes k and v into the cache

Arithmetic is float32 and the result is rounded once, while torch rounds after every operation. A row's bits depend on
that row alone.
Needs the compiled library (`native/row_ops_tile.h`).

Bytes: each input is read once (the norm's second pass reads from the cache), each output is written once. Flops: 4 for
each element of a norm, about 10 and an exponential for a gated one, 3 for a rotated one.
"""

from __future__ import annotations

import ctypes

import torch

from quire.kernels.cpu import native_library

MAX_HEAD_DIM = 512  # MAX_HEAD_DIM of native/attention.h
MAX_ADAPTER_PARTS = 3  # ADAPTER_PARTS of native/adapter.h
_LANES = 16
DTYPE_NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class NormCall(ctypes.Structure):
    """`struct norm_call` of native/row_ops.h."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("weight", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("team", ctypes.c_void_p),
    ]

    @classmethod
    def of(cls, weight: torch.Tensor, columns: int, dtype: torch.dtype, eps: float) -> NormCall:
        """Set the fields that all calls with a weight share. The caller keeps the weight alive.

        Raises ValueError if the weight does not come from `pad_weight` for `columns` columns.
        """
        _check_norm("weight", weight, columns)
        return cls(weight=weight.data_ptr(), columns=columns, dtype=DTYPE_NUMBERS[dtype], eps=eps)


class GatedCall(ctypes.Structure):
    """`struct gated_call` of native/row_ops.h."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
        ("gelu", ctypes.c_int64),
        ("team", ctypes.c_void_p),
    ]

    @classmethod
    def of(cls, columns: int, dtype: torch.dtype, gelu: bool) -> GatedCall:
        """Set the fields that all calls with `columns` columns of the result share."""
        return cls(columns=columns, dtype=DTYPE_NUMBERS[dtype], gelu=gelu)


class RotatePart(ctypes.Structure):
    """`struct rotate_step` of native/row_ops.h: the arguments of one step, for all layers with the same heads."""

    _fields_ = [
        ("rows", ctypes.c_void_p),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("tokens", ctypes.c_int64),
        ("rotary", ctypes.c_int64),
    ]

    @classmethod
    def of(
        cls,
        tokens: int,
        num_kv_heads: int,
        head_dim: int,
        rows: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        dtype: torch.dtype,
    ) -> RotatePart:
        """Check the arguments of `rotate_and_write` for one step and set the fields.

        The caller keeps the tensors alive. Raises ValueError if a shape, dtype or stride is not supported.
        """
        rotary = cos.shape[-1]
        if rotary % 2 or not 0 < rotary <= head_dim:
            raise ValueError(
                f"cos: must have an even number of columns up to {head_dim}, got {rotary}"
            )
        _check("rows", rows, (tokens * num_kv_heads,), torch.int64)
        _check("cos", cos, (tokens, rotary), dtype)
        _check("sin", sin, (tokens, rotary), dtype)
        return cls(rows.data_ptr(), cos.data_ptr(), sin.data_ptr(), tokens, rotary)


class RotateCall(ctypes.Structure):
    """`struct rotate_call` of native/row_ops.h."""

    _fields_ = [
        ("qkv", ctypes.c_void_p),
        ("qkv_stride", ctypes.c_int64),
        ("q_out", ctypes.c_void_p),
        ("k_pages", ctypes.c_void_p),
        ("v_pages", ctypes.c_void_p),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("step", RotatePart),
        ("page_rows", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("team", ctypes.c_void_p),
        ("outside", ctypes.c_int64),
    ]

    @classmethod
    def of(
        cls,
        num_heads: int,
        num_kv_heads: int,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
    ) -> RotateCall:
        """Set the fields that all calls of a layer share. The caller keeps the tensors alive.

        Takes arguments of `rotate_and_write`; raises ValueError if a shape, dtype or stride is not supported.
        """
        head_dim, dtype = k_pages.shape[1], k_pages.dtype
        if head_dim > MAX_HEAD_DIM:
            raise ValueError(f"head_dim: must be at most {MAX_HEAD_DIM}, got {head_dim}")
        for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
            _check(name, pages, (len(pages), head_dim), dtype)
        if (q_norm is None) != (k_norm is None):
            raise ValueError("q_norm, k_norm: must be given together, got one")
        for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
            if norm is not None:
                _check_norm(name, norm, head_dim)
        return cls(
            k_pages=k_pages.data_ptr(),
            v_pages=v_pages.data_ptr(),
            q_norm=None if q_norm is None else q_norm.data_ptr(),
            k_norm=None if k_norm is None else k_norm.data_ptr(),
            page_rows=min(len(k_pages), len(v_pages)),
            heads=num_heads,
            kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=DTYPE_NUMBERS[dtype],
            eps=eps,
        )

    def check_rows(self) -> None:
        """Raise IndexError if the last call had rows outside the cache."""
        if self.outside:
            raise IndexError(f"rows: {self.outside} are not between 0 and {self.page_rows - 1}")


class AdapterCall(ctypes.Structure):
    """`struct adapter_call` of native/adapter.h; `kernels/adapters/cpu_adapters.py` sets the fields."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("parts", ctypes.c_void_p),
        ("step", ctypes.c_void_p),
        ("num_parts", ctypes.c_int64),
        ("columns", ctypes.c_int64 * MAX_ADAPTER_PARTS),
        ("depth", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
        ("team", ctypes.c_void_p),
    ]


class AdapterDownCall(AdapterCall):
    """The first product of low-rank adapters."""


class AdapterUpCall(AdapterCall):
    """The second product of low-rank adapters, added to the output."""


def pad_weight(weight: torch.Tensor) -> torch.Tensor:
    """Convert a norm's weight for this module: float32, padded with zeros to a multiple of 16 elements."""
    size = len(weight)
    padded = torch.zeros(-(-size // _LANES) * _LANES)
    padded[:size] = weight
    return padded


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, isa: str | None = None
) -> torch.Tensor:
    """Compute the RMS norm of each row.

    Parameters
    ----------
    x
        [rows, columns] float32, float16 or bfloat16, rows contiguous.
    weight
        `pad_weight` of the norm's weight [columns].
    eps
        Added to the mean square.
    isa
        Instruction set, one of `native_library.ISAS`; None: the best of this processor.

    Returns
    -------
    [rows, columns] in the dtype of x.

    Raises
    ------
    ValueError
        A shape, dtype or stride that does not fit.
    """
    _check_matrix("x", x)
    rows, columns = x.shape
    call = NormCall.of(weight, columns, x.dtype, eps)
    out = torch.empty(rows, columns, dtype=x.dtype)
    call.x, call.x_stride = x.data_ptr(), x.stride(0) * x.element_size()
    call.out, call.out_stride, call.rows = out.data_ptr(), columns * out.element_size(), rows
    _run("quire_norm", call, isa)
    return out


def gated(gate_up: torch.Tensor, *, gelu: bool = False, isa: str | None = None) -> torch.Tensor:
    """Compute silu(gate) * up, or gelu(gate, approximate="tanh") * up.

    Parameters
    ----------
    gate_up
        [rows, 2 n] float32, float16 or bfloat16, contiguous: gate in the first n columns, up in the others.

    Returns
    -------
    [rows, n] in the same dtype.

    Raises
    ------
    ValueError
        A shape, dtype or stride that does not fit.
    """
    _check_matrix("gate_up", gate_up)
    rows, columns = gate_up.shape
    if columns % 2 or not gate_up.is_contiguous():
        raise ValueError(
            f"gate_up: must be contiguous with an even number of columns, got {list(gate_up.shape)}, strides "
            f"{gate_up.stride()}"
        )
    out = torch.empty(rows, columns // 2, dtype=gate_up.dtype)
    call = GatedCall.of(columns // 2, gate_up.dtype, gelu)
    call.x, call.x_stride = gate_up.data_ptr(), columns * gate_up.element_size()
    call.out, call.out_stride, call.rows = out.data_ptr(), call.x_stride // 2, rows
    _run("quire_gated", call, isa)
    return out


def rotate_and_write(
    qkv: torch.Tensor,
    num_heads: int,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    rows: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    isa: str | None = None,
) -> torch.Tensor:
    """Norm and rotate the heads of q and k, and write k and v into the cache.

    Parameters
    ----------
    qkv
        [tokens, (num_heads + 2 kv_heads) * head_dim] float32, float16 or bfloat16, tokens contiguous: the result of one
        merged projection.
    num_heads
        Query heads.
    k_pages, v_pages
        [page_rows, head_dim] in the dtype of qkv, contiguous: the cache as rows. They may overlap in memory and have
        different lengths.
    rows
        [tokens * kv_heads] int64, contiguous, without duplicates: entry token * kv_heads + head is the row of the cache
        for this k and v.
    cos, sin
        [tokens, rotary] in the dtype of qkv, contiguous, rotary even and at most head_dim.
    q_norm, k_norm
        `pad_weight` of the weights of each head's RMS norm; both or neither.
    eps
        Added to the norms' mean squares.
    isa
        Instruction set, one of `native_library.ISAS`; None: the best of this processor.

    Returns
    -------
    q [tokens, num_heads, head_dim].

    Raises
    ------
    ValueError
        A shape, dtype or stride is not supported.
    IndexError
        A row is outside the cache.
    """
    _check_matrix("qkv", qkv)
    head_dim, tokens = k_pages.shape[1], qkv.shape[0]
    kv_heads = (qkv.shape[1] // head_dim - num_heads) // 2
    if qkv.shape[1] != (num_heads + 2 * kv_heads) * head_dim or kv_heads < 1:
        raise ValueError(
            f"qkv: must be [tokens, (num_heads + 2 kv_heads) * head_dim] with num_heads {num_heads} and head_dim "
            f"{head_dim}, got {list(qkv.shape)}"
        )
    if k_pages.dtype != qkv.dtype:
        raise ValueError(f"k_pages: must be {qkv.dtype} as qkv, got {k_pages.dtype}")
    call = RotateCall.of(num_heads, kv_heads, k_pages, v_pages, q_norm, k_norm, eps)
    call.step = RotatePart.of(tokens, kv_heads, head_dim, rows, cos, sin, qkv.dtype)
    q_out = torch.empty(tokens, num_heads, head_dim, dtype=qkv.dtype)
    call.qkv, call.qkv_stride = qkv.data_ptr(), qkv.stride(0) * qkv.element_size()
    call.q_out = q_out.data_ptr()
    _run("quire_rotate", call, isa)
    call.check_rows()
    return q_out


def _check_matrix(name: str, x: torch.Tensor) -> None:
    if x.dim() != 2 or x.dtype not in DTYPE_NUMBERS or x.stride(1) != 1 or x.device.type != "cpu":
        raise ValueError(
            f"{name}: must be a matrix of float32, float16 or bfloat16 on the CPU, rows contiguous, got "
            f"{list(x.shape)} {x.dtype} on {x.device}, strides {x.stride()}"
        )


def _check(name: str, x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if x.shape != shape or x.dtype != dtype or not x.is_contiguous():
        raise ValueError(
            f"{name}: must be {list(shape)} {dtype}, contiguous, got {list(x.shape)} {x.dtype}, "
            f"strides {x.stride()}"
        )


def _check_norm(name: str, weight: torch.Tensor, columns: int) -> None:
    size = -(-columns // _LANES) * _LANES
    if weight.shape != (size,) or weight.dtype != torch.float32 or not weight.is_contiguous():
        raise ValueError(
            f"{name}: must come from pad_weight, [{size}] torch.float32, got {list(weight.shape)} {weight.dtype}"
        )


def _run(function: str, call: ctypes.Structure, isa: str | None) -> None:
    library = native_library.installed()
    getattr(library.functions, function)(
        ctypes.byref(call), library.isa(isa), library.parallel, torch.get_num_threads()
    )
