"""Checkpoints in the published 8- and 4-bit formats, and the same numbers decoded, made of the zoo's.

Codes and scales are random within the format, not roundings of the zoo's weights, so that every code and block occurs.
The decoded weights are computed here from the formats' definitions, number by number, not by the product.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fp8_checkpoints import COMPRESSED, FLOAT8, change_config
from safetensors.torch import load_file, save_file

BLOCK = (16, 24)  # neither divides the zoo's sizes
INT8 = dict(num_bits=8, type="int", symmetric=True)
MXFP4_CONFIG = dict(
    quant_method="mxfp4",
    modules_to_not_convert=["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
)
BLOCK_CONFIG = dict(
    quant_method="fp8", activation_scheme="dynamic", fmt="e4m3", weight_block_size=list(BLOCK)
)


def compressed(weights: dict[str, Any], activations: dict[str, Any] | None, form: str) -> Any:
    """A quantization_config of compressed-tensors with one group."""
    group = dict(targets=["Linear"], weights=weights, input_activations=activations)
    return COMPRESSED | dict(format=form, config_groups=dict(group_0=group))


INT8_CONFIG = compressed(
    INT8 | dict(strategy="channel", dynamic=False),
    INT8 | dict(strategy="token", dynamic=True),
    "int-quantized",
)
FLOAT_BLOCK_CONFIG = compressed(
    FLOAT8 | dict(strategy="block", block_structure=list(BLOCK)),
    FLOAT8 | dict(strategy="group", group_size=BLOCK[1], dynamic=True),
    "float-quantized",
)
WEIGHT_ONLY_CONFIG = compressed(FLOAT8 | dict(strategy="channel"), None, "naive-quantized")

Encoder = Callable[
    [str, torch.Tensor, torch.Generator], tuple[dict[str, torch.Tensor], torch.Tensor]
]
"""Maps name, weight and random numbers to stored tensors, and to the weight that they mean, float32."""


def fp8_blocks(suffix: str, block: tuple[int, int] = BLOCK) -> Encoder:
    """Codes with one scale for a block, as DeepSeek and Qwen publish."""

    def encode(name, weight, random):
        rows, depth = weight.shape
        grid = (math.ceil(rows / block[0]), math.ceil(depth / block[1]))
        scales = torch.rand(grid, generator=random) * 0.01 + 0.001
        codes = (torch.randn(rows, depth, generator=random) * 40).to(torch.float8_e4m3fn)
        decoded = codes.float()
        for i in range(grid[0]):
            for j in range(grid[1]):
                part = decoded[i * block[0] :, j * block[1] :][: block[0], : block[1]]
                part *= scales[i, j]
        return {name: codes, f"{name}{suffix}": scales}, decoded

    return encode


def per_channel(dtype: torch.dtype, whole: bool = False) -> Encoder:
    """Codes with one scale for an output, or for the whole weight."""

    def encode(name, weight, random):
        rows, depth = weight.shape
        scales = torch.rand(() if whole else (rows, 1), generator=random) * 0.004 + 0.001
        codes = (torch.randn(rows, depth, generator=random) * 40).clamp(-128, 127)
        codes = codes.round().to(torch.int8) if dtype == torch.int8 else codes.to(dtype)
        return {name: codes, f"{name}_scale": scales}, codes.float() * scales

    return encode


def mxfp4(name, weight, random):
    """gpt-oss: of a weight [experts, k, n], blocks [experts, n, k / 32, 16] and scales [experts, n, k / 32]."""
    experts, depth, columns = weight.shape
    codes = torch.randint(0, 16, (experts, columns, depth), generator=random)
    scales = torch.randint(121, 125, (experts, columns, depth // 32), generator=random)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    decoded = values[codes & 7] * torch.where(codes & 8 > 0, -1.0, 1.0)
    decoded = decoded * 2.0 ** (scales - 127.0).repeat_interleave(32, dim=-1)
    pairs = codes.reshape(experts, columns, depth // 32, 16, 2)
    blocks = pairs[..., 0] | pairs[..., 1] << 4
    stored = {f"{name}_blocks": blocks.to(torch.uint8), f"{name}_scales": scales.to(torch.uint8)}
    return stored, decoded.transpose(1, 2).contiguous()


def write(
    source: Path, folder: Path, config: Any, encode: Encoder, *, sharded: bool = False
) -> tuple[Path, Path]:
    """Write `source` with encoded weights; return that checkpoint, and the decoded one in float32.

    Parameters
    ----------
    config
        What config.json gets as quantization_config.
    sharded
        Put codes and scales into different files, the scales into the later one.
    """
    encoded, plain = folder / "encoded", folder / "plain"
    for target in (encoded, plain):
        shutil.copytree(source, target)
    random = torch.Generator().manual_seed(1)
    stored: dict[str, torch.Tensor] = {}
    decoded: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        is_experts = encode is mxfp4 and name.endswith(("gate_up_proj", "down_proj"))
        if is_experts or (encode is not mxfp4 and name.endswith("_proj.weight")):
            tensors, decoded[name] = encode(name, tensor, random)
            stored.update(tensors)
        else:
            # Other weights are exact in bfloat16, as they are stored.
            stored[name] = tensor.bfloat16()
            decoded[name] = stored[name].float()
    save_file(decoded, plain / "model.safetensors", metadata={"format": "pt"})
    change_config(encoded, quantization_config=config, dtype="bfloat16")
    if sharded:
        scales = {n: t for n, t in stored.items() if "_scale" in n}
        shards = {
            "model-00001-of-00002.safetensors": {
                n: t for n, t in stored.items() if n not in scales
            },
            "model-00002-of-00002.safetensors": scales,
        }
        (encoded / "model.safetensors").unlink()
        for file, tensors in shards.items():
            save_file(tensors, encoded / file, metadata={"format": "pt"})
        index = {n: file for file, tensors in shards.items() for n in tensors}
        (encoded / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": index})
        )
    else:
        save_file(stored, encoded / "model.safetensors", metadata={"format": "pt"})
    return encoded, plain
