"""Splits a model into decoder and output head. The head includes operations after its matrix product."""

from __future__ import annotations

import torch
from torch import nn
from transformers.modeling_outputs import MoeModelOutputWithPast

from quire.replica.model.text_part import split_at_decoder


class _Output(MoeModelOutputWithPast):
    """A decoder's output. Fields that only some classes have are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Identity(nn.Module):
    """Replaces the decoder in the head; returns its input. Some heads give further arguments by position.

    It has the decoder's numbers: the code of some heads reads a factor from the decoder.
    """

    def __init__(self, decoder: nn.Module):
        super().__init__()
        for name, value in vars(decoder).items():
            if isinstance(value, int | float) and not hasattr(self, name):
                setattr(self, name, value)

    @property
    def decoder(self) -> _Identity:
        """Itself: some heads call the decoder within their base model."""
        return self

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
    return split_at_decoder(model, _Identity)
