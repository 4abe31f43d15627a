"""Checkpoints stored in FP8, made of the zoo's, in the names and shapes that Hugging Face's formats have."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.kernels import reference

FLOAT8 = dict(num_bits=8, type="float", symmetric=True)
COMPRESSED = dict(
    quant_method="compressed-tensors",
    format="float-quantized",
    quantization_status="compressed",
    ignore=["lm_head"],
    config_groups=dict(
        group_0=dict(
            targets=["Linear"],
            weights=FLOAT8 | dict(strategy="channel", dynamic=False),
            input_activations=FLOAT8 | dict(strategy="token", dynamic=True),
            output_activations=None,
        )
    ),
)
FBGEMM = dict(quant_method="fbgemm_fp8", activation_scale_ub=1200.0)
FP8 = dict(quant_method="fp8", activation_scheme="static")


def write(
    source: Path,
    folder: Path,
    config: Mapping[str, Any],
    *,
    scale_shape: str = "channel",
    extra: Mapping[str, torch.Tensor] | None = None,
    input_scales: bool = False,
) -> Path:
    """Copy `source` with its projections in FP8.

    Parameters
    ----------
    config
        What config.json gets as quantization_config.
    scale_shape
        channel: [n, 1]; vector: [n]; tensor: [1], and one scale for the whole weight; number: the same as [].
    extra
        Tensors beside the weights.
    input_scales
        Store fixed scales of activations, of 0.5.
    """
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight"):
            stored[name] = tensor.bfloat16()
            continue
        weight = tensor if scale_shape in ("channel", "vector") else tensor.reshape(1, -1)
        codes, scales = reference.quantise_rows(weight, float("inf"))
        stored[name] = codes.reshape(tensor.shape)
        shapes = dict(channel=(-1, 1), vector=(-1,), tensor=(1,), number=())
        stored[f"{name}_scale"] = scales.reshape(shapes[scale_shape])
        if input_scales:
            stored[name.replace(".weight", ".input_scale")] = torch.tensor([0.5])
    save_file({**stored, **(extra or {})}, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, quantization_config=config, dtype="bfloat16")
    return folder


def change_config(folder: Path, **entries: Any) -> None:
    """Entries of config.json."""
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **entries}))
