"""Slots of recurrent states."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.replica.device.state_pool import StatePool, StateShape, slot_bytes

LAYOUT = (
    StateShape(0, ("conv", 0), (6, 3), torch.bfloat16),
    StateShape(0, ("recurrent", 0), (2, 4, 5), torch.float32),
    StateShape(2, ("conv", 0), (1, 1), torch.float16),
)


def random_states(layer: int, count: int) -> dict[tuple[str, int], torch.Tensor]:
    return {
        state.name: torch.randn(count, *state.shape).to(state.dtype)
        for state in LAYOUT
        if state.layer == layer
    }


def test_each_slot_keeps_the_states_of_each_layer():
    pool = StatePool(LAYOUT, num_rows=4)
    pool.poison()
    stored = {layer: random_states(layer, 3) for layer in (0, 2)}
    slots = torch.tensor([3, 0, 2])
    for layer, states in stored.items():
        pool.store(layer, slots, states)
    for layer, states in stored.items():
        for name, state in pool.load(layer, slots).items():
            assert state.dtype == states[name].dtype
            assert torch.equal(state, states[name])
        assert all(state.isnan().all() for state in pool.load(layer, torch.tensor([1])).values())


def test_a_loaded_state_is_a_copy():
    pool = StatePool(LAYOUT, num_rows=1)
    slot = torch.tensor([0])
    pool.load(0, slot)["conv", 0].fill_(1)
    assert not pool.load(0, slot)["conv", 0].any()


def test_a_layer_cannot_store_other_states_than_at_load():
    pool = StatePool(LAYOUT, num_rows=1)
    with pytest.raises(RuntimeError, match="layer 2 has states"):
        pool.store(2, torch.tensor([0]), random_states(0, 1))


def test_bytes_of_a_slot_count_every_state():
    payload = 6 * 3 * 2 + 2 * 4 * 5 * 4 + 2
    assert payload <= slot_bytes(LAYOUT) <= payload + 3 * 64
    assert StatePool(LAYOUT, num_rows=4).data.numel() == 5 * slot_bytes(LAYOUT)


def test_snapshots_are_copied_within_the_device_and_to_host_memory_and_back():
    pool = StatePool(LAYOUT, num_rows=2, num_snapshots=2, num_host_snapshots=1)
    device, host = pool.data, pool.host_data
    device.copy_(torch.arange(5)[:, None])
    # Slots 0 and 1 are rows, 2 is the trash slot, 3 and 4 are snapshots, 5 is in host memory.
    pool.copy(np.array([[4, 5], [3, 4], [5, 0], [4, 1]]))
    assert device[:, 0].tolist() == [4, 3, 2, 3, 3] and host[:, 0].tolist() == [4]
    assert (device == device[:, :1]).all() and (host == 4).all()
