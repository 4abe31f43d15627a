"""Repairs of Triton's interpreter, which runs the kernels on CPU tensors on machines without a GPU.

NumPy has no bfloat16, so the interpreter (Triton 3.6 to 3.9) stores such tensors as uint16, with three consequences.

1. Its `tl.dot` multiplies the bit patterns as integers. The repair converts the operands to float32. The result is the
   same as on the matrix units: exact products of the bfloat16 values, added in float32.
2. Its conversion to bfloat16 truncates the mantissa, which is half a unit too low on average. This can hide a missing
   or doubled rounding in a kernel, and differs from torch in every sum of two rows. GPUs round to nearest even.
3. Its conversion from bfloat16 takes another code path than 2, so both are replaced.

Its `tl.dot` of floats calls NumPy's matmul. On some CPUs the bits of a row then depend on the row's place in the tile.
On the matrix units they do not, and the kernels rely on this. So the repair adds the products in the order of k.

The interpreter replaces the functions of `triton.language` when a kernel starts, and again at every call of a function
in the kernel. The second takes a third of a kernel's time and changes nothing, so the repair leaves it out.

It also computes whether each integer operation overflows, and looks at the result in debug mode only, which nothing
turns on. For each tensor it makes the objects of its shape again, and a table of NumPy's types. The repair leaves out
the first and keeps the others: together they take half of a kernel's time. Of the rest a quarter goes to asking again
what is plain: whether a type equals itself, an array fits the type that it was made for, two operands of one type have
a type in common. The repair answers these at once.

Triton 3.6 also converts a scalar, stored as an array of one element, to a Python number in a way that NumPy 2.4 and
later reject (fixed in Triton 3.7).
"""

from __future__ import annotations

import dataclasses

import numpy as np
import triton
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def kernel_device() -> str:
    """Device on which this process runs the kernels: "cpu" if they are interpreted (TRITON_INTERPRET), else "cuda"."""
    return "cpu" if triton.knobs.runtime.interpret else "cuda"


def repair_interpreter() -> None:
    """Apply all repairs. Call it before the first kernel runs; further calls have no effect."""
    if getattr(InterpreterBuilder, "is_repaired", False):
        return
    _repair_dot()
    _repair_bfloat16_casts()
    _repair_index()
    _repair_calls()
    _leave_out_overflow_checks()
    _keep_numpy_types()
    _keep_shapes()
    _answer_plain_questions()
    InterpreterBuilder.is_repaired = True


def _repair_dot() -> None:
    create_dot = InterpreterBuilder.create_dot

    def widened(self, x):
        return self.create_fp_ext(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x

    def create_dot_by_rows(self, a, b, d, input_precision, max_num_imprecise_acc):
        a, b = widened(self, a), widened(self, b)
        if {a.dtype.scalar, b.dtype.scalar} <= {tl.float32, tl.float16} and a.data.ndim == 2:
            return TensorHandle(_product(a.data, b.data, d.data), d.dtype.scalar)
        return create_dot(self, a, b, d, input_precision, max_num_imprecise_acc)

    InterpreterBuilder.create_dot = create_dot_by_rows


def _product(a: np.ndarray, b: np.ndarray, d: np.ndarray) -> np.ndarray:
    """a @ b + d, [m, n] in the dtype of d: every element adds its products in the order of k."""
    a, b = a.astype(d.dtype, copy=False), b.astype(d.dtype, copy=False)
    total = np.zeros_like(d)
    term = np.empty_like(d)
    for k in range(len(b)):
        np.multiply(a[:, k, None], b[k], out=term)
        total += term
    return total + d


def _repair_bfloat16_casts() -> None:
    cast_impl = InterpreterBuilder.cast_impl

    def cast_rounding(self, source, target):
        types = (source.dtype.scalar, target.scalar)
        if types == (tl.float32, tl.bfloat16):
            return TensorHandle(to_bfloat16(source.data), target.scalar)
        if types == (tl.bfloat16, tl.float32):
            bits = source.data.astype(np.uint32) << np.uint32(16)
            return TensorHandle(bits.view(np.float32), target.scalar)
        return cast_impl(self, source, target)

    InterpreterBuilder.cast_impl = cast_rounding


def _repair_index() -> None:
    patch_tensor = interpreter._patch_lang_tensor

    def patch_with_index(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_with_index


class _AlreadyPatched:
    """Stands for the changes of a call within a kernel: there are none to take back."""

    def restore(self) -> None:
        pass


def _repair_calls() -> None:
    patch_lang = interpreter._patch_lang

    def patch_once(fn):
        languages = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        functions = [tl.tensor.__add__, *(language.load for language in languages)]
        if languages and not any(map(tl.core.is_builtin, functions)):
            return _AlreadyPatched()
        return patch_lang(fn)

    interpreter._patch_lang = patch_once


def _leave_out_overflow_checks() -> None:
    builder = interpreter.interpreter_builder
    assert not builder.options.debug, "the checks have an effect"
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _keep_numpy_types() -> None:
    find = interpreter._get_np_dtype
    found: dict[str, np.dtype] = {}

    def find_once(triton_type: tl.dtype) -> np.dtype:
        name = triton_type.name
        if name not in found:
            found[name] = find(triton_type)
        return found[name]

    interpreter._get_np_dtype = find_once


def _keep_shapes() -> None:
    """Give blocks and tensors of one shape the same objects for it."""
    begin_type = tl.block_type.__init__
    found: dict[tuple[int, ...], dict[str, object]] = {}

    def begin_type_with_found(self, element_ty, shape):
        lengths = tuple([x.value if isinstance(x, tl.constexpr) else x for x in shape])
        if lengths not in found:
            begin_type(self, element_ty, list(lengths))
            found[lengths] = dict(
                shape=self.shape,
                numel=self.numel,
                tensor_shape=tl.tuple([tl.constexpr(x) for x in lengths]),
                tensor_numel=tl.constexpr(self.numel),
            )
        self.__dict__ |= found[lengths]
        self.element_ty = element_ty

    def begin_tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        is_block = type.is_block()
        self.shape = type.tensor_shape if is_block else no_shape
        self.numel = type.tensor_numel if is_block else one

    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_if_different(self, lhs, rhs):
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    no_shape, one = tl.tuple([]), tl.constexpr(1)
    tl.block_type.__init__ = begin_type_with_found
    # Formatted when an error message asks for it.
    tl.block_type.name = property(
        lambda self: f"<{self.shape}, {self.element_ty}>", lambda self, name: None
    )
    tl.tensor.__init__ = begin_tensor
    TritonSemantic.broadcast_impl_value = broadcast_if_different


def _answer_plain_questions() -> None:
    """Leave out checks that find nothing; what they could find goes the way of the interpreter."""
    equals, unwrap = tl.dtype.__eq__, tl.core._unwrap_if_constexpr
    check_binary = TritonSemantic.binary_op_type_checking_impl
    plain = frozenset({tl.tensor, int, float, bool, type(None)})

    def begin_handle(self, data, dtype, attr=None):
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    def equals_itself(self, other):
        return self is other or equals(self, other)

    def unwrap_if_constexpr(x):
        kind = type(x)
        if kind is tl.constexpr:
            return x.value
        return x if kind in plain else unwrap(x)

    def check_binary_op(self, lhs, rhs, *allowed, **options):
        if type(lhs) is tl.tensor is type(rhs) and lhs.dtype is rhs.dtype:
            is_whole = lhs.dtype is tl.int32 or lhs.dtype is tl.int64 or lhs.dtype is tl.float32
            if is_whole:
                return self.broadcast_impl_value(lhs, rhs)
        return check_binary(self, lhs, rhs, *allowed, **options)

    def patch_attribute(obj, name, member, builder, scope):
        def call(*args, **options):
            options["_semantic"] = interpreter.interpreter_semantic
            return member(*args, **options)

        scope.set_attr(obj, name, call)

    TensorHandle.__init__ = begin_handle
    tl.dtype.__eq__ = equals_itself
    tl.core._unwrap_if_constexpr = unwrap_if_constexpr
    TritonSemantic.binary_op_type_checking_impl = check_binary_op
    interpreter._patch_attr = patch_attribute


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Round float32 to bfloat16, to nearest even; return the bits as uint16."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FC0), rounded).astype(np.uint16)
