"""A GPU without data: torch's meta device, on which kernels and operations are recorded and compute nothing.

What depends on shapes alone runs as on a GPU: the runner, its captured steps, the kernels' wrappers with their checks.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

from quire.replica.device.cpu_device import CpuDevice
from quire.replica.device.device import Graph, Stream, Tensors, Work
from quire.replica.model.fusion.fused_parts import FusedAttention, FusedNorm, NormWeight, Product

# Operations that run no kernel and alias nothing.
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_ALIASES = {"_unsafe_view"}
# Operations for whose result, or whose size, the host waits; `detach_` is the trace of `torch.tensor`.
_READS = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "detach_"}
H100 = SimpleNamespace(major=9, minor=0, multi_processor_count=132, gcnArchName="")


class HostRead(AssertionError):
    """A GPU could not be given this work ahead: it needs the host's memory, or the host needs its result."""


class Launches(TorchDispatchMode):
    """Notes the name of every kernel, Triton's and torch's, in order.

    Raises
    ------
    HostRead
        While it is entered, work copies from or to the host, or waits for a result.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with self:
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        name = func.overloadpacket.__name__
        given = [x.device for x in _flat((args, kwargs)) if isinstance(x, torch.Tensor)]
        if name in _READS or torch.device("cpu") in [*given, kwargs.get("device")]:
            raise HostRead(f"aten.{name} of tensors on {given}, {kwargs}")
        result = func(*args, **kwargs)
        returns = func._schema.returns
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        if not is_view and name not in _ALLOCATIONS | _ALIASES:
            self.names.append(name)
        return result


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _flat(item)
    elif isinstance(value, dict):
        yield from _flat(list(value.values()))
    else:
        yield value


@dataclass(slots=True)
class MetaGraph:
    """What was captured."""

    name: str
    launches: list[str]


class MetaDevice(CpuDevice):
    """See `Device`: memory is torch's meta device's; captured work is recorded."""

    torch_device = torch.device("meta")
    is_immediate = False
    no_graphs_because = None

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device="meta")

    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor, name: str) -> None:
        assert target.shape == source.shape, name

    @torch.inference_mode()
    def rehearse(self, work: Work, *, name: str, reads: Tensors = (), writes: Tensors = ()) -> None:
        work()

    @torch.inference_mode()
    def capture(
        self, work: Work, *, name: str, reads: Tensors = (), writes: Tensors = ()
    ) -> MetaGraph:
        with Launches() as launches:
            work()
        return MetaGraph(name, launches.names)

    def release(self, graph: Graph) -> None:
        pass


@contextlib.contextmanager
def recorded_kernels() -> Iterator[None]:
    """Meanwhile kernels are noted by the innermost `Launches`, do nothing, and are chosen as for an H100."""

    def run(self: InterpretedFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        mode = torch.utils._python_dispatch._get_current_dispatch_mode()
        if isinstance(mode, Launches):
            mode.names.append(self.fn.__name__)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", run)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: H100)
        yield


def to_meta(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of a fused model without data, of another dtype."""

    def bare(norm: NormWeight) -> NormWeight:
        return replace(norm, weight=norm.weight.to("meta", dtype))

    model = copy.deepcopy(model).to("meta", dtype)
    for module in model.modules():
        if (mixer := getattr(module.forward, "mixer", None)) is not None:
            mixer.constants.update({n: x.to("meta") for n, x in mixer.constants.items()})
        if isinstance(module, FusedNorm):
            module.weight = bare(module.weight)
        if isinstance(module, Product) and module.bias is not None:
            module.bias = module.bias.to("meta", dtype)
        if isinstance(module, FusedAttention):
            if module.norms is not None:
                module.norms = tuple(bare(norm) for norm in module.norms)
            if module.facts.sinks is not None:
                module.facts = replace(module.facts, sinks=module.facts.sinks.to("meta"))
    return model
