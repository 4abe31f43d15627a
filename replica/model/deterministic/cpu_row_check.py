"""`deterministic: true` on the CPU: finds modules of transformers in which a row's bits depend on the other rows.

`make_deterministic` replaces the kinds of modules that it knows. A mixture of experts of another class would be left as
it is: the number of its rows changes the order of its sums. So the other modules are called with random rows, together
and in parts. A module whose rows differ by rounding gets a forward pass in which the products and activations that it
it is: the number of its rows changes the order of its sums. So the other modules are called with random rows, together
and in parts. A module whose rows differ by rounding gets a forward pass in which the products and activations that it
calls have fixed tiles. If its rows still differ, the model is refused by the name of the module.

Modules that take more than rows, such as attention, cannot be called so. Those that call such functions themselves, for
instance for a gate of each head, get that forward pass as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from quire.replica.model.deterministic.cpu_activations import (
    gelu,
    sigmoid,
    silu,
    softplus,
    tanh_gelu,
)
from quire.replica.model.deterministic.cpu_tiles import fitting_tile_rows, tiled_linear
from quire.replica.model.fusion.trial_pass import TrialPass

_NUM_ROWS = 24
# Parts of these rows. Products of 1 to 11 rows have bits of their own.
_PARTS = (slice(0, 1), slice(3, 5), slice(5, 12), slice(1, 24))
# Rounding stays below this share of the largest result. A greater difference is a module that mixes tokens by design,
# such as a convolution.
_MOST_ROUNDING = 1e-3


class NotDeterministicError(ValueError):
    """A module's rows have other bits in other company."""


@torch.inference_mode()
def fix_other_modules(decoder: nn.Module, trial: TrialPass) -> None:
    """Fix the rows of the decoder's modules that `make_deterministic` has left, in place.

    Raises
    ------
    NotDeterministicError
        A module's rows still have other bits in other company.
    """
    shapes = _row_inputs(decoder, trial)
    verdicts: dict[tuple[Any, ...], bool] = {}
    judged: set[nn.Module] = set()
    for name, module in _outermost(decoder, shapes):
        judged.update(module.modules())
        # Layers alike are judged once.
        kind = (type(module), *((n, p.shape) for n, p in module.named_parameters()))
        given = [trial.normal(torch.empty(shape)) for shape in shapes[module]]
        if kind not in verdicts:
            verdicts[kind] = _is_fixed(module, given)
        if verdicts[kind]:
            continue
        _use_fixed_functions(module)
        if not _is_fixed(module, given):
            raise NotDeterministicError(
                f"deterministic: true cannot hold: the rows of {name} ({type(module).__name__}) have other bits in "
                "other company; set deterministic: false"
            )

    for module in _callers(decoder, trial) - judged:
        if not _is_own(module):
            _use_fixed_functions(module)


def _callers(decoder: nn.Module, trial: TrialPass) -> set[nn.Module]:
    """Return the modules of transformers and torch that call a function with bits by position."""
    running: list[nn.Module] = []
    found: set[nn.Module] = set()

    def begin(module: nn.Module, args: Any) -> None:
        running.append(module)

    def end(module: nn.Module, args: Any, result: Any) -> None:
        running.pop()

    class Notes(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            # A recurrent layer has a forward pass of Quire's, and other callers of it read that one's arguments.
            caller = running[-1] if running else None
            if func in FORMS and caller is not None and "forward" not in vars(caller):
                found.add(caller)
            return func(*args, **(kwargs or {}))

    hooks = [m.register_forward_pre_hook(begin) for m in decoder.modules()]
    hooks += [m.register_forward_hook(end) for m in decoder.modules()]
    try:
        with Notes():
            trial.run(trial.context())
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _row_inputs(decoder: nn.Module, trial: TrialPass) -> dict[nn.Module, list[tuple[int, ...]]]:
    """Return shapes of random input for the modules that are called with rows and nothing else."""
    found: dict[nn.Module, list[tuple[int, ...]]] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        are_rows = all(
            isinstance(arg, torch.Tensor) and arg.is_floating_point() and arg.dim() > 1
            for arg in args
        )
        if args and are_rows and not kwargs and len({arg.shape[:-1] for arg in args}) == 1:
            lead = (1,) * (args[0].dim() - 2)
            found[module] = [(*lead, _NUM_ROWS, arg.shape[-1]) for arg in args]

    hooks = [m.register_forward_pre_hook(note, with_kwargs=True) for m in decoder.modules()]
    try:
        trial.run(trial.context())
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _outermost(
    module: nn.Module, shapes: dict[nn.Module, Any], path: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of transformers and torch with such an input that are not within another one."""
    for name, child in module.named_children():
        child_path = f"{path}.{name}".lstrip(".")
        if _is_own(child):
            continue
        if child in shapes:
            yield child_path, child
        else:
            yield from _outermost(child, shapes, child_path)


def _is_own(module: nn.Module) -> bool:
    return type(module).__module__.startswith("quire.")


def _is_fixed(module: nn.Module, given: list[torch.Tensor]) -> bool:
    whole = _first(module(*given))
    for rows in _PARTS:
        part = _first(module(*(x[..., rows, :] for x in given)))
        expected = whole[..., rows, :]
        if part.shape != expected.shape:
            return True
        if not torch.equal(part, expected):
            bound = _MOST_ROUNDING * float(whole.abs().max())
            return float((part - expected).abs().max()) > bound
    return True


def _first(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


def _use_fixed_functions(module: nn.Module) -> None:
    forward, functions = module.forward, _FixedFunctions()
    for part in module.modules():
        # A grouped product of all experts has no fixed form, so one expert is computed after the other.
        if hasattr(getattr(part, "config", None), "_experts_implementation"):
            part.config._experts_implementation = "eager"

    def fixed(*args: Any, **kwargs: Any) -> Any:
        with functions:
            return forward(*args, **kwargs)

    module.forward = fixed


class _FixedFunctions(TorchFunctionMode):
    """Inside it, torch's functions that depend on the number or the position of rows have fixed forms."""

    def __init__(self) -> None:
        super().__init__()
        self._tile_rows: dict[torch.Size, tuple[int, ...]] = {}
        self._forms: dict[Any, Callable[..., Any]] = {F.linear: self._linear, **FORMS}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._forms.get(func, func)(*args, **(kwargs or {}))

    def _linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if weight.shape not in self._tile_rows:
            self._tile_rows[weight.shape] = fitting_tile_rows(weight)
        out = tiled_linear(x.reshape(-1, x.shape[-1]), weight, self._tile_rows[weight.shape])
        if bias is not None:
            out += bias
        return out.view(*x.shape[:-1], len(weight))


# torch computes the remaining elements of these functions otherwise than those of its vector loop.
FORMS: dict[Any, Callable[..., Any]] = {
    F.silu: lambda x, inplace=False: silu(x),
    F.gelu: lambda x, approximate="none": tanh_gelu(x) if approximate == "tanh" else gelu(x),
    F.softplus: softplus,
    F.mish: lambda x, inplace=False: x * torch.tanh(softplus(x)),
    F.elu: lambda x, alpha=1.0, inplace=False: torch.where(x > 0, x, alpha * torch.expm1(x)),
    torch.sigmoid: sigmoid,
    torch.Tensor.sigmoid: sigmoid,
    F.sigmoid: sigmoid,
}
