"""Brings layers that a checkpoint stores in 4 bits to the layout of `W4Linear`, one layer at a time.

`replica/checkpoint/w4_checkpoint.py` has the tensors of each format. A format differs in three ways:

| format | the 8 numbers of a word | a zero point z is stored as |
|---|---|---|
| gptq | input features 8 i to 8 i + 7 | z - 1 modulo 16, in version 2 z |
| awq | output features 8 i + 0, 2, 4, 6, 1, 3, 5, 7 | z, in the same order |
| compressed-tensors | input features 8 i to 8 i + 7 | z; none: all are 8 |

`desc_act` of gptq, and `actorder` of compressed-tensors, assign each input feature to a group by `g_idx`. The input
features are sorted by their group, which makes groups contiguous; the layer then sorts its activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from quire.kernels.rows.w4_linear import PER_WORD, pack_words, unpack_words
from quire.replica.checkpoint.model_spec import CheckpointError
from quire.replica.checkpoint.w4_checkpoint import W4Scheme
from quire.replica.model.layers.linear_parts import whole_layers
from quire.replica.model.layers.w4 import W4Linear
from quire.replica.model.stored.weights import StoredTensor, read_tensors

# Place in a word of output features 0 to 7, in awq.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
_SYMMETRIC_ZERO = 8
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class _Names:
    """Last parts of the names of a layer's tensors; None if the format lacks the tensor."""

    words: str
    scales: str
    zeros: str
    groups: str | None = None
    shape: str | None = None
    # Whether a layer may lack its zero points.
    is_symmetric: bool = False


_NAMES = {
    "gptq": _Names("qweight", "scales", "qzeros", "g_idx"),
    "awq": _Names("qweight", "scales", "qzeros"),
    "compressed-tensors": _Names(
        "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape", True
    ),
}


def put_layers(
    model: nn.Module,
    stored: Mapping[str, StoredTensor],
    scheme: W4Scheme,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, StoredTensor]:
    """Replace the linear layers of a model on the meta device that are stored in 4 bits.

    Parameters
    ----------
    stored
        All tensors of the checkpoint.
    device, dtype
        Device of the layers' tensors, and dtype of the model.

    Returns
    -------
    The stored tensors that remain, biases included.

    Raises
    ------
    CheckpointError
        A tensor is missing, or its shape, dtype or value is not supported.
    """
    names = _NAMES[scheme.method]
    layers = [n.removesuffix(f".{names.words}") for n in stored if n.endswith(f".{names.words}")]
    if not layers:
        raise CheckpointError(
            f"quantization_config is {scheme.method!r}, but no tensor is named *.{names.words}"
        )
    rest = dict(stored)
    for name in layers:
        parts = {
            suffix: rest.pop(f"{name}.{suffix}")
            for suffix in (names.words, names.scales, names.zeros, names.groups, names.shape)
            if suffix is not None and f"{name}.{suffix}" in rest
        }
        linear = _linear(model, name, parts[names.words])
        bias = linear.bias
        if bias is None and f"{name}.bias" in stored:
            bias = nn.Parameter(
                torch.empty(linear.out_features, dtype=dtype, device="meta"), requires_grad=False
            )
        is_part = name in whole_layers(model)
        reader = _LayerReader(name, linear, parts, scheme, device, is_part)
        words, scales, zeros, order = reader.read()
        layer = W4Linear(words, scales, zeros, dtype, order, bias)
        for tensor in (layer.words, layer.scales, layer.zeros, layer.order):
            if tensor is not None:
                tensor._is_hf_initialized = True
        model.set_submodule(name, layer)
    return rest


def _linear(model: nn.Module, name: str, tensor: StoredTensor) -> nn.Linear:
    try:
        module = model.get_submodule(name)
    except AttributeError:
        module = None
    if type(module) is not nn.Linear or module is model.get_output_embeddings():
        raise CheckpointError(
            f"{tensor.file}: {tensor.name!r} is stored in 4 bits; served are linear layers, without the output head "
            "and without the experts of a mixture"
        )
    return module


class _LayerReader:
    """Reads and checks the tensors of one layer."""

    def __init__(
        self,
        name: str,
        linear: nn.Linear,
        parts: Mapping[str, StoredTensor],
        scheme: W4Scheme,
        device: torch.device,
        is_part: bool,
    ):
        self.name = name
        self.is_part = is_part
        self.linear = linear
        self.parts = parts
        self.scheme = scheme
        self.names = _NAMES[scheme.method]
        self.device = device

    def read(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return words, scales, zeros and order of `W4Linear`."""
        groups = self._check()
        read = [part for suffix, part in self.parts.items() if suffix != self.names.shape]
        values = {
            tensor.name.rpartition(".")[2]: value
            for tensor, value in read_tensors(
                sorted(read, key=lambda part: (str(part.file), part.offset)),
                lambda part: torch.empty(part.shape, dtype=part.dtype, device=self.device),
            )
        }
        words, scales = values[self.names.words], values[self.names.scales]
        zeros = values.get(self.names.zeros)
        if not torch.isfinite(scales.float()).all():
            raise self._error(self.names.scales, "must be finite")
        if self.scheme.method == "compressed-tensors":
            numbers = None if zeros is None else unpack_words(zeros.t().contiguous())
            scales = scales.reshape(-1, groups)
            if numbers is None:
                numbers = torch.full(
                    (groups, len(words)), _SYMMETRIC_ZERO, dtype=torch.uint8, device=self.device
                )
        else:
            assert zeros is not None
            numbers, scales = unpack_words(zeros), scales.t()
            if self.scheme.method == "awq":
                numbers = _in_order(numbers)
                words = pack_words(_in_order(unpack_words(words)).t())
            else:
                numbers = numbers + self.scheme.zero_offset & 15
                words = words.t()
        index = values.get(self.names.groups) if self.names.groups is not None else None
        if index is not None and self.is_part:
            index = index - index.min()  # A rank has some of the groups.
        order_of_inputs = None if index is None else self._order(index, groups)
        if order_of_inputs is not None:
            words = pack_words(unpack_words(words.contiguous())[:, order_of_inputs.long()])
        zeros = numbers[:, : len(words)].t()
        return words.contiguous(), scales.contiguous(), zeros.contiguous(), order_of_inputs

    def _check(self) -> int:
        """Check presence, shapes and dtypes of the tensors; return the number of groups."""
        names, (n, k) = self.names, (self.linear.out_features, self.linear.in_features)
        if k % PER_WORD or (n % PER_WORD and names.zeros == "qzeros"):
            raise self._error(
                names.words, f"features must be multiples of {PER_WORD}, are {(n, k)}"
            )
        needed = [names.scales] if names.is_symmetric else [names.scales, names.zeros]
        for suffix in needed:
            if suffix not in self.parts:
                raise self._error(names.words, f"has no tensor {self.name}.{suffix}")
        scales = self.parts[names.scales].shape
        is_by_row = self.scheme.method == "compressed-tensors"  # [n, groups]
        groups = (scales[1] if len(scales) == 2 else 1) if is_by_row else scales[0] if scales else 0
        size = k // groups if groups and k % groups == 0 else 0
        if size not in self.scheme.group_sizes and not (
            groups == 1 and -1 in self.scheme.group_sizes
        ):
            raise self._error(
                names.scales,
                f"must have groups of {_listed(self.scheme.group_sizes)} of {k} input features, has {groups} groups",
            )
        shapes = {
            names.words: {
                "gptq": (k // PER_WORD, n),
                "awq": (k, n // PER_WORD),
                "compressed-tensors": (n, k // PER_WORD),
            }[self.scheme.method],
            names.scales: (n, groups) if is_by_row else (groups, n),
            names.zeros: (-(-n // PER_WORD), groups) if is_by_row else (groups, n // PER_WORD),
            names.groups: (k,),
        }
        for suffix, tensor in self.parts.items():
            if suffix == names.shape:
                continue
            allowed = _FLOATS if suffix == names.scales else (torch.int32,)
            if tensor.shape != shapes[suffix] and not (
                suffix == names.scales and is_by_row and tensor.shape == (n,)
            ):
                raise self._error(
                    suffix, f"must be {list(shapes[suffix])}, is {list(tensor.shape)}"
                )
            if tensor.dtype not in allowed:
                raise self._error(suffix, f"must be {_listed(allowed)}, is {tensor.dtype}")
        return groups

    def _order(self, index: torch.Tensor, groups: int) -> torch.Tensor | None:
        """Return the input features sorted by group; None if they are in order."""
        size = len(index) // groups
        low, high = (int(end) for end in torch.aminmax(index))
        assert self.names.groups is not None
        if low < 0 or high >= groups:
            raise self._error(
                self.names.groups, f"must be in [0, {groups}), is between {low} and {high}"
            )
        counts = torch.bincount(index.long(), minlength=groups)
        if not (counts == size).all():
            raise self._error(
                self.names.groups,
                f"must have {size} input features in each group, has {counts.min()} to {counts.max()}",
            )
        if (index[1:] >= index[:-1]).all():
            return None
        return torch.argsort(index, stable=True).int()

    def _error(self, suffix: str, what: str) -> CheckpointError:
        tensor = self.parts.get(suffix) or next(iter(self.parts.values()))
        return CheckpointError(f"{tensor.file}: {self.name}.{suffix} {what}")


def _in_order(numbers: torch.Tensor) -> torch.Tensor:
    """Bring numbers [m, n] from awq's order in words to that of the output features."""
    places = torch.tensor(_AWQ_PLACES, device=numbers.device)
    return numbers.unflatten(1, (-1, PER_WORD)).index_select(2, places).flatten(1)


def _listed(values: object) -> str:
    return ", ".join(sorted(map(str, values)))  # type: ignore[call-overload]
