"""The formats in which checkpoints store weights, and which of them are served.

This is the declaration from which docs/models.md has its table. It decides nothing: `ModelSpec` reads a checkpoint's
`quantization_config`, and a test gives each example to it. A new format is a row here, its reader, and its layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """One format of stored weights."""

    name: str
    # What the tests compare if it is served; otherwise the reason, and what a user can do.
    note: str
    is_served: bool = False
    # A `quantization_config` of such a checkpoint; empty: it has none.
    example: Mapping[str, Any] = field(default_factory=dict, repr=False)


_FLOAT8 = {"type": "float", "num_bits": 8, "symmetric": True}
_INT8 = {"type": "int", "num_bits": 8, "symmetric": True}
_INT4 = {"type": "int", "num_bits": 4, "symmetric": True, "strategy": "group", "group_size": 128}


def _compressed(form: str, weights: Mapping[str, Any], activations: Any = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
    }


FORMATS: tuple[WeightFormat, ...] = (
    WeightFormat(
        "float32, bfloat16, float16",
        "tokens and log-probabilities, against transformers",
        is_served=True,
    ),
    WeightFormat(
        "FP8 of compressed-tensors, a scale for a channel or a tensor",
        "products, and the model against its dequantised weights",
        is_served=True,
        example=_compressed(
            "float-quantized",
            {**_FLOAT8, "strategy": "channel"},
            {**_FLOAT8, "strategy": "token", "dynamic": True},
        ),
    ),
    WeightFormat(
        "FP8 of fbgemm",
        "as above, with the bound of activations",
        is_served=True,
        example={"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
    ),
    WeightFormat(
        "plain FP8, a scale for a tensor",
        "as above",
        is_served=True,
        example={"quant_method": "fp8", "activation_scheme": "dynamic"},
    ),
    WeightFormat(
        "plain FP8, a scale for a block of weights",
        "decoded to `dtype`: bits equal transformers' dequantised weights",
        is_served=True,
        example={
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
    ),
    WeightFormat(
        "W8A8 of compressed-tensors, 8-bit integers",
        "products, and the model against its dequantised weights",
        is_served=True,
        example=_compressed(
            "int-quantized",
            {**_INT8, "strategy": "channel"},
            {**_INT8, "strategy": "token", "dynamic": True},
        ),
    ),
    WeightFormat(
        "W4A16 of compressed-tensors",
        "products, and the model against its dequantised weights",
        is_served=True,
        example=_compressed("pack-quantized", _INT4),
    ),
    WeightFormat(
        "GPTQ",
        "products, and the model against its dequantised weights",
        is_served=True,
        example={"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True},
    ),
    WeightFormat(
        "AWQ",
        "products, and the model against its dequantised weights",
        is_served=True,
        example={"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
    ),
    WeightFormat(
        "MXFP4",
        "decoded to `dtype`: bits equal transformers' dequantised weights",
        is_served=True,
        example={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    ),
    WeightFormat(
        "bitsandbytes",
        "quantises while loading: serve the original checkpoint with `engine.weights: int8`",
        example={"quant_method": "bitsandbytes", "load_in_4bit": True},
    ),
    WeightFormat(
        "others: AQLM, EETQ, HQQ, Quanto, SpQR, torchao, VPTQ",
        "rare: serve the original checkpoint",
        example={"quant_method": "hqq"},
    ),
)
