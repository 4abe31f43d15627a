"""A GPU for Triton without one: its JIT specialises for sm_90 as it would there, launches do nothing.

```
 kernel[grid](...) ──▶ Triton's own JIT: types, == 1, % 16, alignment ──▶ a key that is new ──▶ compile ──▶ launch
                                                                                                   │          │
 FakeGpu                                                               notes the variant, compiles it or not  nothing
```

Tensors lie in the host's memory. What a kernel should have written stays what it was: `install` makes new memory zero,
so tokens are ids, logits are finite, and both mean nothing.

A process that uses this must not have TRITON_INTERPRET set, and ends with it: nothing is restored.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from quire.kernels import tuning
from tests.kernels.compile.offline_compile import read_cubin

CAPABILITY = 90
PROCESSORS = 132  # of an H100


@dataclass(slots=True)
class Variant:
    """A kernel as the JIT asked for it."""

    kernel: str
    specialised: dict[str, str]  # what the code may rely on, by argument and option
    values: dict[str, str] = field(default_factory=dict)  # arguments of its first launch
    seconds: float = 0.0  # of its compilation; 0: it was not compiled
    registers: int = 0  # a thread's
    stack_bytes: int = 0  # a thread's; 0: nothing spilled
    shared_bytes: int = 0  # a program's

    def differences(self, other: Variant) -> list[str]:
        """Arguments on which two variants of a kernel differ."""
        names = self.specialised.keys() | other.specialised.keys()
        return sorted(n for n in names if self.specialised.get(n) != other.specialised.get(n))


class _Kernel:
    """What the JIT takes for a compiled kernel."""

    function = packed_metadata = None

    def __init__(self, variant: Variant, names: list[str]):
        self._variant = variant
        self._names = names

    def launch_metadata(self, *_: object) -> None:
        return None

    def run(self, *args: object) -> None:
        """Called as Triton's launcher: the kernel's arguments come last."""
        if not self._variant.values:
            values = args[len(args) - len(self._names) :]
            self._variant.values = dict(zip(self._names, map(_value, values), strict=True))


class FakeGpu:
    """Stands in for Triton's driver; knows every variant that was asked for, in order.

    Attributes
    ----------
    compiles
        Whether each variant is compiled to a cubin, by Triton's own ptxas; else it is only noted.
    """

    def __init__(self) -> None:
        self.variants: list[Variant] = []
        self.compiles = False
        self._device = 0
        self._lock = threading.Lock()

    def install(self) -> None:
        """Make it Triton's driver and the GPU that the kernels' tables are read for, in this process.

        Raises
        ------
        RuntimeError
            The kernels were imported for the interpreter.
        """
        if triton.knobs.runtime.interpret:
            raise RuntimeError("unset TRITON_INTERPRET: its kernels are never specialised")
        driver.set_active(self)
        triton.compiler.compile = self._compile
        _replace(tuning.device_arch, lambda device: f"sm_{CAPABILITY}")
        _replace(tuning.has_fp8_conversion, lambda device: True)
        from quire.kernels.attention import decode_plan

        _replace(decode_plan._num_processors, lambda device: PROCESSORS)
        for owner, name in (
            (torch, "empty"),
            (torch, "empty_like"),
            (torch.Tensor, "new_empty"),
        ):
            setattr(owner, name, _zeroed(getattr(owner, name)))

    def forget(self) -> None:
        """As in a new process: every variant is asked for again."""
        self._device += 1
        self.variants = []

    def describe(self, since: int) -> list[str]:
        """Of each variant from this one on: kernel, the arguments that are new about it, and their values."""
        return [self._describe(i) for i in range(since, len(self.variants))]

    def _describe(self, index: int) -> str:
        late = self.variants[index]
        known = [v for v in self.variants[:index] if v.kernel == late.kernel]
        if not known:
            return f"{late.kernel}: was never launched before"
        nearest = min(known, key=lambda v: len(late.differences(v)))
        parts = [
            f"{name} {late.specialised.get(name)} (value {late.values.get(name)}), "
            f"before {nearest.specialised.get(name)} (value {nearest.values.get(name)})"
            for name in late.differences(nearest)
        ]
        return f"{late.kernel}: {'; '.join(parts)}"

    def _compile(
        self, source: Any, target: Any = None, options: Any = None, **_: object
    ) -> _Kernel:
        """In the place of `triton.compiler.compile`; may be called in several threads."""
        variant = Variant(source.fn.fn.__name__, dict(_specialised(source, options)))
        if self.compiles:
            began = time.perf_counter()
            made = triton.compiler.compiler.compile(source, target=target, options=options)
            variant.seconds = time.perf_counter() - began
            variant.registers, variant.stack_bytes = read_cubin(made.asm["cubin"])
            variant.shared_bytes = made.metadata.shared
        with self._lock:
            self.variants.append(variant)
        return _Kernel(variant, source.fn.arg_names)

    # -- what Triton asks of a driver ---------------------------------------------------------------------

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CAPABILITY, 32)

    def get_current_device(self) -> int:
        """Triton keeps what it has compiled by this number."""
        return self._device

    def get_current_stream(self, device: int) -> int:
        return 0


def _specialised(source: Any, options: dict[str, Any]) -> Iterator[tuple[str, str]]:
    names = source.fn.arg_names
    constants = {path[0]: value for path, value in source.constants.items() if len(path) == 1}
    divisible = {path[0] for path, facts in source.attrs.items() if facts}
    for i, name in enumerate(names):
        if i in constants:
            yield name, f"is {constants[i]}"
        else:
            yield name, source.signature[name] + (" % 16" if i in divisible else "")
    yield from ((name, str(value)) for name, value in sorted((options or {}).items()))


def _value(argument: object) -> str:
    if isinstance(argument, torch.Tensor):
        return f"address % 16 = {argument.data_ptr() % 16}"
    return str(argument)


def _zeroed(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *args, **kwargs: allocate(*args, **kwargs).zero_()


def _replace(function: Any, by: Any) -> None:
    """Wherever a module of the kernels has imported it."""
    for name, module in list(sys.modules.items()):
        if name.startswith("quire.kernels."):
            for key, value in list(vars(module).items()):
                if value is function:
                    setattr(module, key, by)
