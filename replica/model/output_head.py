"""A model's output head by itself: hidden states to logits, with whatever the architecture does after the product."""

from __future__ import annotations

import copy

import torch
from torch import nn
from transformers.modeling_outputs import MoeModelOutputWithPast


class _Identity(nn.Module):
    """Stands in for the decoder: what goes in is what comes out."""

    def forward(self, inputs_embeds: torch.Tensor, **_: object) -> MoeModelOutputWithPast:
        return MoeModelOutputWithPast(last_hidden_state=inputs_embeds)


def split_model(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """A causal language model as its decoder and its head.

    The head is the model without its decoder, so soft-capping or scaling of the logits stay the architecture's own.
    Both share the model's modules as they are now.

    Returns
    -------
    The decoder, and a module that is called with ``inputs_embeds`` [1, n, hidden size] and has `logits`
    [1, n, vocab].
    """
    name = model.base_model_prefix
    head = copy.copy(model)
    head._modules = {**model._modules, name: _Identity()}
    return getattr(model, name), head
