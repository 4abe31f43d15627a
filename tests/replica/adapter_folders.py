"""Adapter folders with random weights, as PEFT saves them, and checkpoints with an adapter merged in float64."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

ALL_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save_adapter(
    folder: Path,
    checkpoint: Path,
    *,
    rank: int = 4,
    seed: int = 0,
    size: float = 1.0,
    targets: Iterable[str] = ALL_LAYERS,
    **config: object,
) -> Path:
    """Save a random adapter of a checkpoint's linear layers whose names end with one of `targets`."""
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if weight.dim() == 2 and layer.rpartition(".")[2] in tuple(targets):
            columns, depth = weight.shape
            down = torch.randn(rank, depth, generator=random) / math.sqrt(depth)
            up = torch.randn(columns, rank, generator=random) * size / math.sqrt(rank)
            tensors[f"base_model.model.{layer}.lora_A.weight"] = down
            tensors[f"base_model.model.{layer}.lora_B.weight"] = up
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    values = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(targets),
        "bias": "none",
        "use_rslora": False,
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder


def save_merged(folder: Path, checkpoint: Path, adapter: Path) -> Path:
    """Copy a checkpoint and add an adapter to its weights: W + scale B A, computed in float64."""
    shutil.copytree(checkpoint, folder)
    config = json.loads((adapter / "adapter_config.json").read_text())
    rank = config["r"]
    scale = config["lora_alpha"] / (math.sqrt(rank) if config["use_rslora"] else rank)
    weights = load_file(checkpoint / "model.safetensors")
    pairs = load_file(adapter / "adapter_model.safetensors")
    for name, down in pairs.items():
        if ".lora_A." not in name:
            continue
        up = pairs[name.replace(".lora_A.", ".lora_B.")]
        own = name.removeprefix("base_model.model.").replace(".lora_A", "")
        weights[own] = (weights[own].double() + scale * up.double() @ down.double()).float()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
