"""Recurrent layers in Quire's own kernels, for all rows of a step at a time.

```
 hidden [1, T, H] ─▶ input products ─▶ short convolution ─▶ gates ─▶ state scan ─▶ norm and gate ─▶ output product
                                        state in slots               state in slots
```

A mixer computes what a module of transformers computes, with that module's own products and parameters. It is built
from the names and shapes of these; `recurrent_fusion.py` proves it. Elementwise functions are written with
operations of torch that give an element the same bits at every position (`model/deterministic/cpu_activations.py`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import nn

from quire.kernels.recurrence.recurrent_rows import RecurrentRows
from quire.replica.device.state_pool import StateName

States = Mapping[StateName, torch.Tensor]
_CONV, _RECURRENT, _LINEAR = ("conv", 0), ("recurrent", 0), ("linear", 0)
_NORM_EPS = 1e-6  # of the keys of a gated delta rule, in transformers


@dataclass(frozen=True, slots=True)
class RecurrenceKernels:
    """The kernels of a device: `quire.kernels.recurrence`."""

    short_conv: Callable[..., torch.Tensor]  # arguments: `recurrence_checks.check_conv`, and `silu`
    state_scan: Callable[..., torch.Tensor]  # arguments: `recurrence_checks.check_scan`


class Mixer(ABC):
    """A recurrent layer.

    Parameters
    ----------
    module
        The module of transformers. Its products are read at each call, because they may be replaced later.
    states
        The states of one request, [1, ...] each, as the module keeps them.

    Attributes
    ----------
    constants
        Parameters of the module in the form that the mixer reads, by name.

    Raises
    ------
    AttributeError, KeyError, ValueError
        The module has another structure.
    """

    def __init__(self, module: nn.Module, states: States, kernels: RecurrenceKernels):
        self.module = module
        self.kernels = kernels
        self.constants: dict[str, torch.Tensor] = {}

    def keep(self, **parameters: torch.Tensor) -> None:
        """Add constants in float32."""
        self.constants |= {name: x.detach().float().contiguous() for name, x in parameters.items()}

    @abstractmethod
    def __call__(self, hidden: torch.Tensor, states: States, rows: RecurrentRows) -> torch.Tensor:
        """Compute [1, T, hidden] from hidden states [1, T, hidden]; the states are [slots, ...] views of the pool."""

    def module_states(self, states: States) -> dict[StateName, torch.Tensor]:
        """Return the values of slots in the module's order."""
        return dict(states)


class _Conv:
    """A module's depthwise causal convolution; its state is kept as [taps, channels]."""

    def __init__(self, conv: nn.Module, mixer: Mixer, silu: bool):
        channels, one, _ = conv.weight.shape
        if one != 1 or conv.groups != channels:
            raise ValueError(f"a convolution of {list(conv.weight.shape)} is not depthwise")
        mixer.keep(conv_weight=conv.weight[:, 0].t())
        if conv.bias is not None:
            mixer.keep(conv_bias=conv.bias)
        self._constants = mixer.constants
        self._kernels = mixer.kernels
        self._silu = silu

    def __call__(self, x: torch.Tensor, states: States, rows: RecurrentRows) -> torch.Tensor:
        """[T, channels] to the same."""
        own, constants = _transposed(states[_CONV]), self._constants
        weight, bias = constants["conv_weight"], constants.get("conv_bias")
        return self._kernels.short_conv(x, weight, bias, own, rows, self._silu)


def _transposed(states: torch.Tensor) -> torch.Tensor:
    """Return the memory of [slots, ..., a, b] as [slots, ..., b, a]: another order of the elements of a slot."""
    a, b = states.shape[-2:]
    return states.flatten(-2).unflatten(-1, (b, a))


def _reordered(states: torch.Tensor) -> torch.Tensor:
    """Return the values [..., a, b] of states that `_transposed` memory holds."""
    return _transposed(states).transpose(-2, -1)


class ShortConvMixer(Mixer):
    """out(c conv(b x)) with b, c, x = in(hidden): the short convolution of LFM2."""

    def __init__(self, module: nn.Module, states: States, kernels: RecurrenceKernels):
        super().__init__(module, states, kernels)
        _check_states(states, _CONV)
        self._conv = _Conv(module.conv, self, silu=False)

    def __call__(self, hidden: torch.Tensor, states: States, rows: RecurrentRows) -> torch.Tensor:
        """See `Mixer`."""
        b, c, x = self.module.in_proj(hidden)[0].chunk(3, dim=-1)
        y = c * self._conv(b * x, states, rows)
        return self.module.out_proj(y[None])

    def module_states(self, states: States) -> dict[StateName, torch.Tensor]:
        """See `Mixer`."""
        return {_CONV: _reordered(states[_CONV])}


class GatedDeltaMixer(Mixer):
    """Gated delta rule: S = a S + k beta (v - a k S), with a = exp(-exp(A) softplus(dt + bias)) (arXiv 2412.06464).

    `beta_scale` is 2 where eigenvalues may be negative.
    """

    def __init__(
        self, module: nn.Module, states: States, kernels: RecurrenceKernels, beta_scale: float = 1.0
    ):
        super().__init__(module, states, kernels)
        _check_states(states, _CONV, _RECURRENT)
        _, self._heads, self._key_dim, self._value_dim = states[_RECURRENT].shape
        self._values = self._heads * self._value_dim
        self._keys = (states[_CONV].shape[1] - self._values) // 2
        self._beta_scale = beta_scale
        self._conv = _Conv(module.conv1d, self, silu=True)
        self.keep(a=-module.A_log.float().exp(), dt_bias=module.dt_bias)
        is_short = hasattr(module, "o_proj")
        self._norm_name, self._out_name = ("o_norm", "o_proj") if is_short else ("norm", "out_proj")
        self._norm = _GatedNorm(
            getattr(module, self._norm_name), self, self._value_dim, gate_first=False
        )

    def __call__(self, hidden: torch.Tensor, states: States, rows: RecurrentRows) -> torch.Tensor:
        """See `Mixer`."""
        inputs, gate, b, a = self._project(hidden)
        inputs = self._conv(inputs, states, rows).float()
        q, k, v = inputs.split([self._keys, self._keys, self._values], dim=-1)
        q, k = (x.unflatten(-1, (-1, self._key_dim)) for x in (q, k))
        v = v.unflatten(-1, (self._heads, self._value_dim))
        q = q * (_inverse_length(q) * self._key_dim**-0.5)
        k = k * _inverse_length(k)
        log_decay = softplus(a.float() + self.constants["dt_bias"]) * self.constants["a"]
        beta = sigmoid(b.float()) * self._beta_scale
        y = self.kernels.state_scan(q, k, v, log_decay, beta, states[_RECURRENT], rows)
        y = self._norm(y, gate.unflatten(-1, (self._heads, self._value_dim)))
        return getattr(self.module, self._out_name)(y.flatten(1).to(hidden.dtype)[None])

    def module_states(self, states: States) -> dict[StateName, torch.Tensor]:
        """See `Mixer`."""
        return {_CONV: _reordered(states[_CONV]), _RECURRENT: states[_RECURRENT]}

    def _project(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return inputs of the convolution [T, channels], gate [T, values], b and a [T, heads]."""
        module = self.module
        if hasattr(module, "in_proj_qkv"):
            names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
            return tuple(getattr(module, name)(hidden)[0] for name in names)
        if hasattr(module, "in_proj_qkvz"):
            products = module.in_proj_qkvz(hidden), module.in_proj_ba(hidden)
            parts = module.fix_query_key_value_ordering(*products)
            q, k, v, gate, b, a = (part[0] for part in parts)
            q, k, v, gate = (part.flatten(1) for part in (q, k, v, gate))
        else:
            q, k, v, gate, b, a = (getattr(module, f"{name}_proj")(hidden)[0] for name in "qkvgba")
        return torch.cat([q, k, v], dim=-1), gate, b, a


class Mamba2Mixer(Mixer):
    """Mamba-2: S = exp(dt A) S + b dt x, y = c S + D x, with dt = softplus(dt + bias) within limits (arXiv 2405.21060).

    The module keeps S as [heads, value_dim, state]; here it is [heads, state, value_dim].
    """

    def __init__(self, module: nn.Module, states: States, kernels: RecurrenceKernels):
        super().__init__(module, states, kernels)
        _check_states(states, _CONV, _RECURRENT)
        _, self._heads, self._value_dim, self._state = states[_RECURRENT].shape
        self._values = self._heads * self._value_dim
        self._channels = states[_CONV].shape[1]
        self._keys = (self._channels - self._values) // 2
        self._conv = _Conv(module.conv1d, self, silu=True)
        self.keep(a=-module.A_log.float().exp(), d=module.D, dt_bias=module.dt_bias)
        self._limits = tuple(getattr(module, "time_step_limit", (0.0, math.inf)))
        self._norm = None
        if not isinstance(module.norm, nn.Identity):
            size = getattr(module.norm, "group_size", self._values * self._state // self._keys)
            self._norm = _GatedNorm(module.norm, self, size, gate_first=True)

    def __call__(self, hidden: torch.Tensor, states: States, rows: RecurrentRows) -> torch.Tensor:
        """See `Mixer`."""
        module = self.module
        # Falcon-H1 scales its inputs.
        scaled = hidden * getattr(module, "ssm_in_multiplier", 1.0)
        product = module.in_proj(scaled)[0]
        product = product * getattr(module, "mup_vector", 1.0)
        product = product.view(product.shape[-2:])
        gate, inputs, dt = product.split([self._values, self._channels, self._heads], dim=-1)
        inputs = self._conv(inputs, states, rows).float()
        x, b, c = inputs.split([self._values, self._keys, self._keys], dim=-1)
        x = x.unflatten(-1, (self._heads, self._value_dim))
        b, c = (part.unflatten(-1, (-1, self._state)) for part in (b, c))
        dt = softplus(dt.float() + self.constants["dt_bias"]).clamp(*self._limits)
        own = _transposed(states[_RECURRENT])
        y = self.kernels.state_scan(
            c, b, x * dt[..., None], dt * self.constants["a"], None, own, rows
        )
        y = (y + x * self.constants["d"][:, None]).flatten(1)
        y = y * silu(gate.float()) if self._norm is None else self._norm(y, gate)
        return module.out_proj(y.to(hidden.dtype)[None])

    def module_states(self, states: States) -> dict[StateName, torch.Tensor]:
        """See `Mixer`."""
        return {name: _reordered(state) for name, state in states.items()}


class LightningMixer(Mixer):
    """Lightning attention: S = exp(-slope) S + k v, y = q S (arXiv 2401.04658), with a norm and a sigmoid gate."""

    def __init__(self, module: nn.Module, states: States, kernels: RecurrenceKernels):
        super().__init__(module, states, kernels)
        _check_states(states, _LINEAR)
        _, self._heads, self._size, _ = states[_LINEAR].shape
        self.keep(log_decay=-module.slope_rate.view(self._heads), norm=module.norm.weight)
        self._eps: float = module.norm.variance_epsilon

    def __call__(self, hidden: torch.Tensor, states: States, rows: RecurrentRows) -> torch.Tensor:
        """See `Mixer`."""
        module = self.module
        product = silu(module.qkv_proj(hidden)[0].float())
        q, k, v = product.unflatten(-1, (self._heads, -1)).split(self._size, dim=-1)
        log_decay = self.constants["log_decay"].expand(len(q), -1)
        y = self.kernels.state_scan(q, k, v, log_decay, None, states[_LINEAR], rows).flatten(1)
        y = _rms_normed(y, self._eps) * self.constants["norm"]
        y = y * sigmoid(module.output_gate(hidden)[0].float())
        return module.out_proj(y.to(hidden.dtype)[None])


class _GatedNorm:
    """RMS norm over groups of columns and a SiLU gate, before (`gate_first`) or after the norm."""

    def __init__(self, norm: nn.Module, mixer: Mixer, size: int, gate_first: bool):
        mixer.keep(norm=norm.weight)
        self._constants = mixer.constants
        self._eps: float = getattr(norm, "variance_epsilon", None) or norm.eps
        self._size = size
        self._gate_first = gate_first

    def __call__(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """x float32 and gate [..., columns] to the same in float32."""
        gate = silu(gate.float())
        if self._gate_first:
            x = x * gate
        x = _rms_normed(x.unflatten(-1, (-1, self._size)), self._eps).flatten(-2)
        x = x * self._constants["norm"]
        return x if self._gate_first else x * gate


def _rms_normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)


def _inverse_length(x: torch.Tensor) -> torch.Tensor:
    return torch.rsqrt((x * x).sum(-1, keepdim=True) + _NORM_EPS)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)) of float32."""
    return (torch.exp(-x) + 1.0).reciprocal()


def silu(x: torch.Tensor) -> torch.Tensor:
    """x / (1 + exp(-x)) of float32."""
    return x / (torch.exp(-x) + 1.0)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)) of float32; x above 20, as in torch."""
    return torch.where(x > 20.0, x, torch.log1p(torch.exp(x)))


def _check_states(states: States, *names: StateName) -> None:
    if set(states) != set(names):
        raise ValueError(f"has states {[*states]}, not {[*names]}")


# Arguments: as of `Mixer`.
Build: TypeAlias = Callable[[nn.Module, States, RecurrenceKernels], Mixer]


def candidates(module: nn.Module) -> list[Build]:
    """Return builders of the mixers that have a module's parameters, the likeliest first."""
    names = {name for name, _ in module.named_children()}
    if names == {"conv", "in_proj", "out_proj"}:
        return [ShortConvMixer]
    if hasattr(module, "slope_rate"):
        return [LightningMixer]
    if hasattr(module, "A_log") and hasattr(module, "D"):
        return [Mamba2Mixer]
    if hasattr(module, "A_log"):
        return [GatedDeltaMixer, partial(GatedDeltaMixer, beta_scale=2.0)]
    return []
