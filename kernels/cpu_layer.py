"""What a decoder layer does between its matrix products, on the CPU in C: one pass over the rows each.

    rms_norm              y = x / sqrt(mean(x^2) + eps) * weight
    gated                 y = act(gate) * up, of [gate | up]
    rotate_and_write      q, k normed a head and rotated; k and v into their pages

Arithmetic is in float32, rounded once (a model's own operations round in between); a row's bits depend on that row
alone. Needs the compiled library (`native/layer_tile.h`).

Bytes: each input is read once, from the norm's second pass on out of the cache, each output written once.
"""

from __future__ import annotations

import ctypes

import torch

from quire.kernels import native_library

MAX_HEAD_DIM = 512  # of native/attention.h
_LANES = 16
_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class _NormCall(ctypes.Structure):
    """`struct norm_call` of native/layer.h."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("team", ctypes.c_void_p),
    ]


class _GatedCall(ctypes.Structure):
    """`struct gated_call` of native/layer.h."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
        ("gelu", ctypes.c_int64),
        ("team", ctypes.c_void_p),
    ]


class _RotateCall(ctypes.Structure):
    """`struct rotate_call` of native/layer.h."""

    _fields_ = [
        ("qkv", ctypes.c_void_p),
        ("qkv_stride", ctypes.c_int64),
        ("q_out", ctypes.c_void_p),
        ("k_pages", ctypes.c_void_p),
        ("v_pages", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("page_rows", ctypes.c_int64),
        ("tokens", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("rotary", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("team", ctypes.c_void_p),
        ("outside", ctypes.c_int64),
    ]


def pad_weight(weight: torch.Tensor) -> torch.Tensor:
    """A norm's weight as the functions here want it: float32, zeros up to a multiple of 16 elements."""
    size = len(weight)
    padded = torch.zeros(-(-size // _LANES) * _LANES)
    padded[:size] = weight
    return padded


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, isa: str | None = None
) -> torch.Tensor:
    """RMS norm of each row.

    Parameters
    ----------
    x
        [rows, columns] float32, float16 or bfloat16, rows contiguous.
    weight
        `pad_weight` of the norm's [columns].
    isa
        As in `cpu_linear.packed_linear`.

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
    _check_norm("weight", weight, columns)
    out = torch.empty(rows, columns, dtype=x.dtype)
    call = _NormCall(
        x=x.data_ptr(),
        x_stride=x.stride(0) * x.element_size(),
        out=out.data_ptr(),
        weight=weight.data_ptr(),
        rows=rows,
        columns=columns,
        dtype=_DTYPES[x.dtype],
        eps=eps,
    )
    _run("quire_norm", call, isa)
    return out


def gated(gate_up: torch.Tensor, *, gelu: bool = False, isa: str | None = None) -> torch.Tensor:
    """silu(gate) * up, or gelu(gate, approximate="tanh") * up.

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
    call = _GatedCall(
        x=gate_up.data_ptr(),
        out=out.data_ptr(),
        rows=rows,
        columns=columns // 2,
        dtype=_DTYPES[gate_up.dtype],
        gelu=gelu,
    )
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
    """Norm and rotate the heads of q and k, and write k and v into their pages.

    Parameters
    ----------
    qkv
        [tokens, (num_heads + 2 kv_heads) * head_dim] float32, float16 or bfloat16, tokens contiguous: one merged
        projection.
    k_pages, v_pages
        [page_rows, head_dim] in the dtype of qkv, contiguous; they may be views of one memory, of different lengths.
    rows
        [tokens * kv_heads] int64, contiguous: row token * kv_heads + head of k and v goes there; each at most once.
    cos, sin
        [tokens, rotary] in the dtype of qkv, contiguous, rotary even and at most head_dim.
    q_norm, k_norm
        `pad_weight` of the RMS norm of each head; both or neither.
    eps
        Of the norms.

    Returns
    -------
    q [tokens, num_heads, head_dim].

    Raises
    ------
    ValueError
        A shape, dtype or stride that does not fit.
    IndexError
        A row that the pages do not have.
    """
    _check_matrix("qkv", qkv)
    head_dim, tokens = k_pages.shape[1], qkv.shape[0]
    kv_heads = (qkv.shape[1] // head_dim - num_heads) // 2
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim: must be at most {MAX_HEAD_DIM}, got {head_dim}")
    if qkv.shape[1] != (num_heads + 2 * kv_heads) * head_dim or kv_heads < 1:
        raise ValueError(
            f"qkv: must be [tokens, (num_heads + 2 kv_heads) * head_dim] with num_heads {num_heads} and head_dim "
            f"{head_dim}, got {list(qkv.shape)}"
        )
    rotary = cos.shape[-1]
    if rotary % 2 or not 0 < rotary <= head_dim:
        raise ValueError(f"cos: must have an even number of columns up to {head_dim}, got {rotary}")
    for name, tensor, shape, dtype in (
        ("k_pages", k_pages, k_pages.shape, qkv.dtype),
        ("v_pages", v_pages, (len(v_pages), head_dim), qkv.dtype),
        ("rows", rows, (tokens * kv_heads,), torch.int64),
        ("cos", cos, (tokens, rotary), qkv.dtype),
        ("sin", sin, (tokens, rotary), qkv.dtype),
    ):
        if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(
                f"{name}: must be {list(shape)} {dtype}, contiguous, got {list(tensor.shape)} {tensor.dtype}, "
                f"strides {tensor.stride()}"
            )
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm, k_norm: must be given together, got one")
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None:
            _check_norm(name, norm, head_dim)
    page_rows = min(len(k_pages), len(v_pages))
    q_out = torch.empty(tokens, num_heads, head_dim, dtype=qkv.dtype)
    call = _RotateCall(
        qkv=qkv.data_ptr(),
        qkv_stride=qkv.stride(0) * qkv.element_size(),
        q_out=q_out.data_ptr(),
        k_pages=k_pages.data_ptr(),
        v_pages=v_pages.data_ptr(),
        rows=rows.data_ptr(),
        cos=cos.data_ptr(),
        sin=sin.data_ptr(),
        q_norm=None if q_norm is None else q_norm.data_ptr(),
        k_norm=None if k_norm is None else k_norm.data_ptr(),
        page_rows=page_rows,
        tokens=tokens,
        heads=num_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rotary=rotary,
        dtype=_DTYPES[qkv.dtype],
        eps=eps,
    )
    _run("quire_rotate", call, isa)
    if call.outside:
        raise IndexError(f"rows: {call.outside} are not between 0 and {page_rows - 1}")
    return q_out


def _check_matrix(name: str, x: torch.Tensor) -> None:
    if x.dim() != 2 or x.dtype not in _DTYPES or x.stride(1) != 1 or x.device.type != "cpu":
        raise ValueError(
            f"{name}: must be a matrix of float32, float16 or bfloat16 on the CPU, rows contiguous, got "
            f"{list(x.shape)} {x.dtype} on {x.device}, strides {x.stride()}"
        )


def _check_norm(name: str, weight: torch.Tensor, columns: int) -> None:
    size = -(-columns // _LANES) * _LANES
    if weight.shape != (size,) or weight.dtype != torch.float32 or not weight.is_contiguous():
        raise ValueError(
            f"{name}: must come from pad_weight, [{size}] torch.float32, got {list(weight.shape)} {weight.dtype}"
        )


def _run(function: str, call: ctypes.Structure, isa: str | None) -> None:
    library = native_library.load()
    number = library.best_isa if isa is None else native_library.ISAS.index(isa)
    if number > library.best_isa:
        raise ValueError(
            f"isa: this processor has {native_library.ISAS[: library.best_isa + 1]}, got {isa!r}"
        )
    getattr(library.functions, function)(
        ctypes.byref(call), number, library.parallel, torch.get_num_threads()
    )
