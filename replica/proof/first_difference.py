"""Finds the first module whose result differs between the engine and transformers, when a proof has failed.

```
 decoder                   ok   differs        each call: its first tensor in and out, a row for each token
   embed_tokens            ok   ok
   layers.0                ok   differs   ◀─ the first child that differs: look into it
     input_layernorm       ok   ok
     self_attn             ok   differs   ◀─ look into it
       q_proj, k_proj      ok   ok
       o_proj         differs   differs        its input differs already: the difference arises in self_attn
```

The engine computes one sequence alone, in chunks, and without fused layers, so that every module is called.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from quire.replica.model.text_part import causal_model, split_at_decoder


@dataclass(slots=True)
class ModuleCall:
    """One call of a module, with the calls that it made."""

    name: str  # within the decoder
    module: nn.Module
    # First tensor in and out, [1, T, ...] or [T, ...] float32 on the CPU; None: there is none.
    argument: torch.Tensor | None = None
    result: torch.Tensor | None = None
    calls: list[ModuleCall] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens of a call of the decoder."""
        return 0 if self.result is None else self.result.shape[1]

    def call(self, name: str, index: int) -> ModuleCall | None:
        """Return the call of a module that this call made, the `index`-th one; None: it made fewer."""
        same = [call for call in self.calls if call.name == name]
        return same[index] if index < len(same) else None


@dataclass(frozen=True, slots=True)
class Found:
    """Where two passes differ first."""

    call: ModuleCall
    part: str  # input or output
    token: int  # from 1
    difference: float


def find_module(
    engine_model: nn.Module,
    model: nn.Module,
    run_engine: Callable[[], list[int]],
    tolerance: float,
) -> str | None:
    """Return which module differs first, as text; None: the results of the decoders do not differ.

    Parameters
    ----------
    engine_model
        The model of an engine whose layers are not fused.
    model
        transformers' model, from `make_model`.
    run_engine
        Lets the engine compute a sequence, in one step or more, and returns its tokens.
    tolerance
        Largest difference, as a part of the root mean square of a tensor.
    """
    with _recorded(_decoder(engine_model)) as ours:
        token_ids = run_engine()
    with _recorded(_decoder(model)) as theirs, torch.inference_mode():
        causal_model(model)(torch.tensor([token_ids]), use_cache=False)
    found = _first([call for call in ours if call.num_tokens], theirs[-1], tolerance)
    return None if found is None else _describe(found, model)


def failed_module(error: BaseException) -> str:
    """Return the innermost module in which an error was raised, in brackets; empty: in none."""
    frames = traceback.walk_tb(error.__traceback__)
    owners = [frame.f_locals.get("self") for frame, _ in frames]
    modules = [owner for owner in owners if isinstance(owner, nn.Module)]
    if not modules:
        return ""
    names = {module: name for name, module in modules[0].named_modules()}
    name = names.get(modules[-1])
    return f" (in {type(modules[-1]).__name__}{f', {name}' if name else ''})"


def _decoder(model: nn.Module) -> nn.Module:
    return split_at_decoder(model, lambda decoder: decoder)[0]


@contextmanager
def _recorded(decoder: nn.Module) -> Iterator[list[ModuleCall]]:
    """Record the calls of a decoder and of all modules within it."""
    steps: list[ModuleCall] = []
    stack: list[ModuleCall] = []
    with ExitStack() as hooks:
        for name, module in decoder.named_modules():

            def before(
                module: nn.Module, args: tuple, options: Mapping[str, Any], name: str = name
            ) -> None:
                call = ModuleCall(name, module, _first_tensor((*args, *options.values())))
                (stack[-1].calls if stack else steps).append(call)
                stack.append(call)

            def after(module: nn.Module, args: tuple, output: Any) -> None:
                values = output.values() if isinstance(output, Mapping) else output
                stack.pop().result = _first_tensor(
                    [values] if isinstance(values, torch.Tensor) else values
                )

            hooks.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(after).remove)
        yield steps


def _first_tensor(values: Any) -> torch.Tensor | None:
    """Return a copy of the first tensor of numbers. Some modules change their arguments later."""
    for value in values if isinstance(values, list | tuple) else list(values or ()):
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim > 1:
            return value.detach().to("cpu", torch.float32, copy=True)
    return None


def _first(ours: Sequence[ModuleCall], theirs: ModuleCall, tolerance: float) -> Found | None:
    """Return where the chunks of a prompt differ first from the call for the whole prompt; calls of the decoder."""
    lengths = [call.num_tokens for call in ours]

    def compare(part: str, chunks: Sequence[ModuleCall], whole: ModuleCall) -> Found | None:
        name = "argument" if part == "input" else "result"
        expected = _rows(getattr(whole, name), theirs.num_tokens)
        pieces = [_rows(getattr(c, name), n) for c, n in zip(chunks, lengths, strict=True)]
        if expected is None or not all(
            piece is not None and piece.shape[1:] == expected.shape[1:] for piece in pieces
        ):
            return None
        given = torch.cat([piece for piece in pieces if piece is not None])[: len(expected)]
        if len(given) < len(expected):
            return None
        off = (given - expected).abs().flatten(1).amax(1)
        # A NaN differs.
        differs = ~(off <= tolerance * expected.square().mean().sqrt())
        if not differs.any():
            return None
        token = int(differs.int().argmax())
        return Found(whole, part, token + 1, float(off[token]))

    def look_into(chunks: Sequence[ModuleCall], whole: ModuleCall) -> Found | None:
        counts: dict[str, int] = {}
        for call in whole.calls:
            index = counts[call.name] = counts.get(call.name, -1) + 1
            same = [made for chunk in chunks if (made := chunk.call(call.name, index))]
            if len(same) < len(chunks):
                continue
            if before := compare("input", same, call):
                # Its caller computes this input. The decoder's own result says less.
                return before if whole is theirs else None
            if after := compare("output", same, call):
                return look_into(same, call) or after
        return None

    return look_into(ours, theirs) or compare("output", ours, theirs)


def _rows(tensor: torch.Tensor | None, num_tokens: int) -> torch.Tensor | None:
    """Return [num_tokens, ...]; None: the tensor has not a row for each token."""
    if tensor is None:
        return None
    if tensor.ndim > 2 and tensor.shape[:2] == (1, num_tokens):
        return tensor[0]
    return tensor if tensor.shape[0] == num_tokens else None


def _describe(found: Found, model: nn.Module) -> str:
    decoder, module = _decoder(model), found.call.module
    names = {other: name for name, other in model.named_modules()}
    name = ".".join(filter(None, (names[decoder], found.call.name))) or "the decoder"
    kind = _layer_type(found.call.name, decoder)
    return (
        f"the {found.part} of {name} ({type(module).__name__}{kind}) differs from transformers' by "
        f"{found.difference:.3g} (token {found.token})"
    )


def _layer_type(name: str, decoder: nn.Module) -> str:
    """Return the entry of `layer_types` for the layer that has a module, after a comma; empty: there is none."""
    types = getattr(decoder.config, "layer_types", None)
    index = next((int(part) for part in name.split(".") if part.isdigit()), None)
    if not types or index is None or index >= len(types):
        return ""
    return f", {types[index]}"
