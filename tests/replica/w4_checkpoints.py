"""Checkpoints stored in 4 bits, made of the zoo's: written number by number, as the formats define them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

# Output feature of each of the 8 numbers of a word, in awq.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def config_of(method: str, size: int, symmetric: bool = True, **changes: Any) -> dict[str, Any]:
    """A quantization_config as the tools of a format write it."""
    if method == "gptq":
        found = dict(bits=4, group_size=size, sym=symmetric, desc_act=False)
    elif method == "awq":
        found = dict(bits=4, group_size=size, zero_point=True, version="gemm")
    else:
        weights = dict(num_bits=4, type="int", symmetric=symmetric, dynamic=False)
        weights |= (
            dict(strategy="channel") if size == -1 else dict(strategy="group", group_size=size)
        )
        group = dict(targets=["Linear"], weights=weights, input_activations=None)
        found = dict(format="pack-quantized", ignore=["lm_head"], config_groups=dict(group_0=group))
    return dict(quant_method=method, **found) | changes


def write(
    source: Path,
    folder: Path,
    config: dict[str, Any],
    *,
    size: int,
    symmetric: bool = True,
    sorted_inputs: bool = True,
) -> tuple[Path, Path]:
    """Copy `source` with its projections in 4 bits, and once more with the dequantised weights.

    Parameters
    ----------
    config
        What config.json gets as quantization_config.
    size, symmetric
        Input features of a group, -1: all; whether all zero points are 8.
    sorted_inputs
        False: input features are assigned to groups in a random order (g_idx).

    Returns
    -------
    Both folders. The dequantised weights are float32.
    """
    rng = np.random.default_rng(7)
    plain = folder.with_name(f"{folder.name}-plain")
    stored: dict[str, torch.Tensor] = {}
    dequantised: dict[str, torch.Tensor] = {}
    orders: dict[int, np.ndarray] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            stored[name] = dequantised[name] = tensor
            continue
        k = tensor.shape[1]
        groups = 1 if size == -1 else k // size
        index = np.arange(k) // (k // groups)
        if not sorted_inputs:
            index = orders.setdefault(k, index[rng.permutation(k)])
        numbers, scales, zeros = _quantise(tensor.numpy(), index, groups, symmetric)
        weight = scales[:, index].astype(np.float32) * (numbers - zeros[:, index])
        dequantised[name] = torch.from_numpy(weight.astype(np.float32))
        parts = _TENSORS[config["quant_method"]](numbers, scales, zeros, config)
        if not sorted_inputs:
            key = "weight_g_idx" if config["quant_method"] == "compressed-tensors" else "g_idx"
            parts[key] = index.astype(np.int32)
        elif config["quant_method"] == "gptq":
            parts["g_idx"] = index.astype(np.int32)
        prefix = name.removesuffix(".weight")
        for suffix, part in parts.items():
            stored[f"{prefix}.{suffix}"] = torch.from_numpy(np.ascontiguousarray(part))
    for path, tensors in ((folder, stored), (plain, dequantised)):
        shutil.copytree(source, path)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, quantization_config=config)
    return folder, plain


def _quantise(
    weight: np.ndarray, index: np.ndarray, groups: int, symmetric: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """numbers [n, k] 0 to 15, scales [n, groups] float16, zeros [n, groups]; index [k] has each input's group."""
    n = len(weight)
    scales = np.empty((n, groups), np.float16)
    zeros = np.full((n, groups), 8)
    for group in range(groups):
        part = weight[:, index == group]
        if symmetric:
            scales[:, group] = np.abs(part).max(1) / 7.5
        else:
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            scales[:, group] = (high - low) / 15
            zeros[:, group] = np.clip(np.round(-low / scales[:, group]), 0, 15)
    numbers = np.round(weight / scales[:, index].astype(np.float32)) + zeros[:, index]
    return np.clip(numbers, 0, 15).astype(np.int64), scales, zeros


def _words(numbers: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """Pack 8 numbers of the last axis in a word; number `order[i]` gets bits 4 i to 4 i + 3."""
    words = np.zeros((*numbers.shape[:-1], -(-numbers.shape[-1] // 8)), np.uint32)
    for word in range(words.shape[-1]):
        for place in range(8):
            if word * 8 + order[place] < numbers.shape[-1]:
                number = numbers[..., word * 8 + order[place]].astype(np.uint32)
                words[..., word] |= number << np.uint32(4 * place)
    return words.view(np.int32)


def _gptq(numbers, scales, zeros, config):
    offset = 0 if config.get("checkpoint_format") == "gptq_v2" else 1
    return dict(
        qweight=_words(numbers).T,
        qzeros=_words((zeros.T - offset) % 16),
        scales=scales.T,
    )


def _awq(numbers, scales, zeros, config):
    return dict(
        qweight=_words(numbers.T, AWQ_ORDER), qzeros=_words(zeros.T, AWQ_ORDER), scales=scales.T
    )


def _compressed(numbers, scales, zeros, config):
    parts = dict(
        weight_packed=_words(numbers),
        weight_scale=scales,
        weight_shape=np.array(numbers.shape),
    )
    (group,) = config["config_groups"].values()
    if not group["weights"]["symmetric"]:
        parts["weight_zero_point"] = _words(zeros.T).T
    return parts


_TENSORS = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed}


def change_config(folder: Path, **entries: Any) -> None:
    """Set entries of config.json."""
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **entries}))


def copy_json(source: Path, folder: Path, **entries: Any) -> None:
    """Copy config.json only, with changed entries."""
    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    change_config(folder, **entries)
