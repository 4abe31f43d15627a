"""Recurrent modules of transformers with states in slots."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM, Lfm2Config
from transformers.cache_utils import LinearAttentionLayer

from quire.replica.device.state_pool import StatePool
from quire.replica.model.layers.state_layers import RowsCache, StepCache, split_state_layers


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5), kernel=st.integers(1, 5))
def test_inputs_of_a_convolution_are_kept_as_by_transformers(lengths, kernel):
    expected = LinearAttentionLayer()
    states = {}
    for length in lengths:
        x = torch.randn(2, 3, length)
        cache = RowsCache(states)
        found = cache.update_conv_state(x, 0, conv_kernel_size=kernel)
        assert torch.equal(found, expected.update_conv_state(x, conv_kernel_size=kernel))
        states = cache.states
        assert torch.equal(states["conv", 0], expected.conv_states[0])


class Sum(nn.Module):
    """Adds all inputs so far; `by_token`: it reads its state in calls of one token only."""

    def __init__(self, by_token: bool):
        super().__init__()
        self.layer_idx = 0
        self.by_token = by_token

    def forward(self, hidden_states, scale=None, cache=None, **kwargs):
        earlier = cache.get_recurrent_state(0)
        x = hidden_states if scale is None else hidden_states * scale
        out = x.cumsum(1)
        if earlier is not None and not (self.by_token and hidden_states.shape[1] > 1):
            out = out + earlier[:, None]
        cache.update_recurrent_state(out[:, -1], 0)
        return out


class Model(nn.Module):
    def __init__(self, by_token: bool):
        super().__init__()
        self.config = Lfm2Config(hidden_size=4)
        self.embedding = nn.Embedding(3, 4)
        self.mixer = Sum(by_token)

    def get_input_embeddings(self):
        return self.embedding


@settings(max_examples=40, deadline=None)
@given(data=st.data(), by_token=st.booleans())
def test_rows_of_any_lengths_continue_their_own_states(data, by_token):
    """Each request's outputs are those of one call for all its tokens, whatever the steps, slots and snapshots."""
    model = Model(by_token)
    layout = split_state_layers(model)
    assert [(state.layer, state.name, state.shape) for state in layout] == [
        (0, ("recurrent", 0), (4,))
    ]
    pool = StatePool(layout, num_rows=4, num_snapshots=8)
    pool.poison()
    slots = data.draw(st.permutations(range(4)))
    inputs, outputs, done = [torch.empty(0, 4)] * 4, [torch.empty(0, 4)] * 4, [0] * 4
    for _ in range(data.draw(st.integers(1, 4))):
        rows = data.draw(st.lists(st.integers(0, 3), min_size=1, unique=True))
        counts = [data.draw(st.integers(1, 3)) for _ in rows]
        x, scale = torch.randn(1, sum(counts), 4), torch.randn(1, sum(counts), 4)
        for row, count in zip(rows, counts, strict=True):
            done[row] += count
        kv_len = np.array([done[row] for row in rows])
        places = np.array([slots[row] for row in rows])
        places_of_saves = [(i, n) for i, count in enumerate(counts) for n in range(1, count + 1)]
        chosen = data.draw(st.lists(st.sampled_from(places_of_saves), max_size=8, unique=True))
        saves = np.array([(i, n, 5 + k) for k, (i, n) in enumerate(chosen)]).reshape(-1, 3)
        cache = StepCache.of(pool, places, np.array(counts), kv_len, saves)
        found = model.mixer(x, scale, cache=cache, quire=None)
        parts = zip(rows, (x * scale)[0].split(counts), found[0].split(counts), strict=True)
        for row, own, result in parts:
            inputs[row] = torch.cat([inputs[row], own])
            outputs[row] = torch.cat([outputs[row], result])
        for i, n, slot in saves.tolist():
            row = rows[i]
            length = done[row] - counts[i] + n
            (state,) = pool.load(0, torch.tensor([slot])).values()
            torch.testing.assert_close(state[0], inputs[row][:length].sum(0))
    for row in range(4):
        torch.testing.assert_close(outputs[row], inputs[row].cumsum(0))


def test_a_model_that_is_split_already_stays_as_it_is():
    model = Model(by_token=False)
    first = split_state_layers(model)
    forward = model.mixer.forward
    assert split_state_layers(model) == first
    assert model.mixer.forward is forward


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_states_of_a_class_are_found_without_its_weights(device):
    config = Lfm2Config(
        hidden_size=32, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1,
        num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"], vocab_size=16,
    )  # fmt: skip
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    layout = split_state_layers(model)
    assert [(s.layer, s.name, s.shape, s.dtype) for s in layout] == [
        (layer, ("conv", 0), (32, config.conv_L_cache), torch.bfloat16) for layer in (0, 2)
    ]
