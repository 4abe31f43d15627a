"""Maps stored tensors to tensors of the model, or to parts of them, and allocates their memory.

```
 stored                                        the model's
 q_proj.weight, k_proj.weight, v_proj.weight   the same, adjacent in memory: the merged weight of one matrix product
                                               is a view, which takes neither memory nor time
 experts.7.up_proj.weight                      experts.gate_up_proj[7, n:]
```
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from quire.replica.checkpoint.model_spec import CheckpointError
from quire.replica.device.cpu_device import zero_pages
from quire.replica.model.layers.fp8 import Fp8Linear, Int8Linear
from quire.replica.model.stored.encoded_weights import CODES
from quire.replica.model.stored.weights import StoredTensor

# Of a mixture, or of a part of it (`sharded/shared_layers.py`).
_EXPERT = re.compile(r"(.+\.experts(?:\.parts\.\d+)?)\.(\d+)\.(gate|up|down)_proj\.weight")
_LINEAR = {nn.Linear, Fp8Linear, Int8Linear}
_MERGED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """The tensor of the model, or the part of it, that a stored tensor fills."""

    name: str  # name of the model's tensor
    index: tuple[int | slice, ...] = ()  # part of it; () is the whole tensor


def map_weights(
    model: nn.Module, stored: Mapping[str, StoredTensor]
) -> dict[str, WeightTarget] | None:
    """Map names of stored tensors to targets; None if stored tensors and the model's do not match one to one.

    Tied tensors count as one. For None, the caller lets transformers load the checkpoint or report the error.

    Raises
    ------
    CheckpointError
        A tensor is stored in 8 bits, but has no scale or does not belong to a linear layer.
    """
    # Tensors that are not on the meta device have their values.
    state = {name: tensor for name, tensor in model.state_dict().items() if tensor.is_meta}
    places: dict[str, WeightTarget] = {}
    filled: Counter[str] = Counter()
    for name, tensor in stored.items():
        if name not in state or state[name].dtype not in CODES:
            _check_no_codes(tensor)
    for name, tensor in stored.items():
        place = WeightTarget(name) if name in state else _expert(name, state)
        if place is None or tensor.dtype is None:
            return None
        target = state[place.name][place.index]
        if is_scale(place, state):
            fits = tensor.shape in ((), (1,), (1, 1), (len(target),), (len(target), 1))
        else:
            fits = target.shape == tensor.shape
        if not fits:
            return None
        places[name] = place
        filled[place.name] += target.numel()
    return places if _is_complete(model, state, stored, filled) else None


def check_kinds(model: nn.Module, stored: Mapping[str, StoredTensor]) -> None:
    """Check that no tensor of whole numbers, or of bits, is stored where the model has floating-point numbers.

    Raises
    ------
    CheckpointError
        The message names file, tensor and dtypes.
    """
    state = model.state_dict()
    for name, tensor in stored.items():
        if name not in state or not state[name].is_floating_point():
            continue
        if tensor.dtype is None or not tensor.dtype.is_floating_point:
            kind = "an unknown dtype" if tensor.dtype is None else str(tensor.dtype)
            raise CheckpointError(
                f"{tensor.file}: {name!r} is stored as {kind.removeprefix('torch.')}; the model has floating-point "
                "numbers there"
            )


def is_scale(place: WeightTarget, state: Mapping[str, torch.Tensor]) -> bool:
    """Whether the target is the tensor of scales of a layer in 8 bits."""
    weight = state.get(place.name.removesuffix("_scale"))
    return place.name.endswith(".weight_scale") and weight is not None and weight.dtype in CODES


def _expert(name: str, state: Mapping[str, torch.Tensor]) -> WeightTarget | None:
    """Map an expert's weight into the stacked weights: gate and up share a stack, down has its own."""
    match = _EXPERT.fullmatch(name)
    if match is None:
        return None
    prefix, expert, part = match[1], int(match[2]), match[3]
    stack = f"{prefix}.down_proj" if part == "down" else f"{prefix}.gate_up_proj"
    if stack not in state or state[stack].dim() != 3 or expert >= len(state[stack]):
        return None
    if part == "down":
        return WeightTarget(stack, (expert,))
    half = state[stack].shape[1] // 2
    return WeightTarget(stack, (expert, slice(half) if part == "gate" else slice(half, None)))


def _check_no_codes(tensor: StoredTensor) -> None:
    if tensor.dtype in CODES:
        raise CheckpointError(
            f"{tensor.file}: {tensor.name!r} is stored in 8 bits; served are weights of linear layers and of "
            "experts with a scale beside them, in a format that quantization_config names"
        )


def _is_complete(
    model: nn.Module,
    state: Mapping[str, torch.Tensor],
    stored: Mapping[str, StoredTensor],
    filled: Mapping[str, int],
) -> bool:
    """Whether every tensor of the model is filled exactly once.

    Scales of weights that are quantised while loading may be missing, because they are computed.
    """
    if any(count != state[name].numel() for name, count in filled.items()):
        return False
    tied = model.all_tied_weights_keys  # {one of the same weight: the other}
    missing = state.keys() - filled.keys()
    if any(one in missing and other in missing for one, other in tied.items()):
        return False
    for name in missing - tied.keys() - set(tied.values()):
        weight = stored.get(name.removesuffix("_scale"))
        if not is_scale(WeightTarget(name), state) or weight is None:
            return False
        _check_no_codes(weight)
    return True


class ModelMemory:
    """Allocates the memory of a model's tensors; weights that are merged later are adjacent.

    Parameters
    ----------
    model
        A model on the meta device.
    device
        Device of the memory.
    unread
        Parameters that stay zero.
    """

    def __init__(self, model: nn.Module, device: torch.device, unread: frozenset[str]):
        self._unread = unread
        self.state = model.state_dict()  # shapes and dtypes
        self.made: dict[str, torch.Tensor] = {}
        self._device = device
        self._together = _together(model)

    def tensor(self, name: str) -> torch.Tensor:
        """Return the memory of one of the model's tensors; the first call allocates it."""
        if name not in self.made and name in self._together:
            names = self._together[name]
            lengths = [len(self.state[n]) for n in names]
            whole = self._empty((sum(lengths), self.state[name].shape[1]), name)
            self.made.update(zip(names, whole.split(lengths), strict=True))
        elif name not in self.made:
            self.made[name] = self._empty(self.state[name].shape, name)
        return self.made[name]

    def _empty(self, shape: Sequence[int], name: str) -> torch.Tensor:
        if name in self._unread:
            return zero_pages(shape, self.state[name].dtype)
        return torch.empty(shape, dtype=self.state[name].dtype, device=self._device)


def _together(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Map each weight that is merged with others to the names of the whole group."""
    found: dict[str, tuple[str, ...]] = {}
    for prefix, module in model.named_modules():
        children = dict(module.named_children())
        for names in _MERGED:
            parts = [children[name] for name in names if name in children]
            kinds = {type(part) for part in parts}
            if len(parts) < len(names) or len(kinds) != 1 or not kinds <= _LINEAR:
                continue
            if len({(part.in_features, part.weight.dtype) for part in parts}) == 1:
                weights = tuple(f"{prefix}.{name}.weight" for name in names)
                found.update(dict.fromkeys(weights, weights))
    return found
