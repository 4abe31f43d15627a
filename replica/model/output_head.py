"""Splits a model into decoder and output head. The head includes operations after its matrix product."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn
from transformers.modeling_outputs import MoeModelOutputWithPast


class _Output(MoeModelOutputWithPast):
    """A decoder's output. Fields that only some classes have are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Identity(nn.Module):
    """Replaces the decoder in the head; returns its input. Some heads give further arguments by position."""

    def forward(self, *_: object, inputs_embeds: torch.Tensor, **__: object) -> _Output:
        return _Output(last_hidden_state=inputs_embeds)


def split_model(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Split a causal language model into decoder and head.

    The head is the model with an identity as decoder, so it keeps the architecture's soft-capping or scaling of logits.
    Both parts share the model's current modules.

    Returns
    -------
    The decoder, and a module to call with ``inputs_embeds`` [1, n, hidden size]; its result has `logits` [1, n, vocab].
    """
    path = [model.base_model_prefix]
    inner = getattr(model, path[0])
    # The head of some classes calls the decoder within its base model.
    if getattr(inner, "decoder", None) is model.get_decoder():
        path.append("decoder")
    return model.get_submodule(".".join(path)), _with_identity(model, path)


def _with_identity(module: nn.Module, path: Sequence[str]) -> nn.Module:
    """Return a shallow copy of a module in which the module at `path` is an identity."""
    name, *rest = path
    inner = _with_identity(module.get_submodule(name), rest) if rest else _Identity()
    copied = copy.copy(module)
    copied._modules = {**module._modules, name: inner}
    return copied
