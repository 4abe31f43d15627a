"""Imports transformers' model code without torch's compiler and distributed tensors.

`transformers.modeling_utils` imports `torch._dynamo` for a few decorators, and `torch.distributed.tensor` for kinds of
parallelism that Quire does not use. Operations on the meta device import `torch._dynamo` too. All that takes a second
and 110 MB of a process that never compiles. Therefore stand-ins take the places of its modules while transformers is
imported and while a model is built on the meta device. They have the few names that are asked for then. Any other name
loads the real module.

Afterwards `torch.compile` works as before. transformers answers for the rest of the process that `torch.distributed` is
not available, so its `tp_plan="auto"` and FSDP need a process without this module.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from quire.replica.checkpoint import transformers_index

_COMPILER = "torch._dynamo"
_TRANSFORM = f"{_COMPILER}._trace_wrapped_higher_order_op"
_Result = TypeVar("_Result")


def without_compiler(make: Callable[[], _Result]) -> _Result:
    """Return `make()`, with stand-ins in place. If an import fails on them, `make` is called again without them."""
    if _COMPILER in sys.modules:
        return make()
    stand_ins = [_StandIn(name) for name in _ATTRIBUTES if name not in sys.modules]
    sys.modules.update((module.__name__, module) for module in stand_ins)
    vars(torch)["_dynamo"] = sys.modules[_COMPILER]
    try:
        return make()
    except ImportError:
        _remove(stand_ins)
        return make()
    finally:
        _remove(stand_ins)


class _StandIn(types.ModuleType):
    """Is in `sys.modules` in the place of a module of this name, until a name is used that it does not have."""

    def __init__(self, name: str):
        super().__init__(name)
        vars(self).update(_ATTRIBUTES[name])

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        _remove([self])
        return getattr(importlib.import_module(self.__name__), attribute)


def _remove(stand_ins: list[_StandIn]) -> None:
    for module in stand_ins:
        if sys.modules.get(module.__name__) is module:
            del sys.modules[module.__name__]
        if vars(torch).get("_dynamo") is module:
            # torch imports the real one at its next use.
            del vars(torch)["_dynamo"]


def _unchanged(function: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Decorate a function without changing it. The real decorators tell the compiler how to trace it."""
    return function if callable(function) else _unchanged


def _transform() -> Any:
    """Return the real context manager, which a mask function needs under `vmap`."""
    return importlib.import_module(_TRANSFORM).TransformGetItemToIndex()


_ATTRIBUTES: dict[str, dict[str, Any]] = {
    _COMPILER: dict.fromkeys(("assume_constant_result", "allow_in_graph", "disable"), _unchanged),
    _TRANSFORM: {"TransformGetItemToIndex": _transform},
}


def _import_attention() -> Any:
    transformers_index.install()
    from transformers.utils import import_utils

    # transformers asks once and remembers the answer.
    is_available, torch.distributed.is_available = torch.distributed.is_available, lambda: False
    try:
        import_utils.is_torch_distributed_available()
    finally:
        torch.distributed.is_available = is_available
    # Every model class inherits the mixin.
    from transformers import AttentionInterface, GenerationMixin  # noqa: F401

    return AttentionInterface


AttentionInterface = without_compiler(_import_attention)
