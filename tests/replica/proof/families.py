"""Configurations of transformers' causal model types, as their classes make them without a checkpoint."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

# All causal model types, in the installed version, and all of classes that take images too.
MODEL_TYPES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
WRAPPER_TYPES = tuple(sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES))
# What every checkpoint of a type states, and its class leaves open.
_STATED = {
    "head_dim": 64,
    "n_shared_experts": 1,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
# What every checkpoint of one type states: which layers have attention, how axes share a rotated head.
_SECTIONS = {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [16, 24, 24]}
_STEP_TYPES = (["full_attention"] + ["sliding_attention"] * 3) * 11 + ["full_attention"]
_STATED_BY_TYPE: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": _SECTIONS}},
    "paddleocr_vl_text": {"rope_parameters": _SECTIONS},
    # Windowed layers have query heads of their own number.
    "step3p5": {
        "layer_types": _STEP_TYPES,
        "sliding_window": 512,
        "per_layer_config": {
            str(layer): {"num_attention_heads": 96}
            for layer, kind in enumerate(_STEP_TYPES)
            if kind == "sliding_attention"
        },
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in set(_STEP_TYPES)
        },
    },
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense"] + ["sparse"] * 11},
    # Of the wrapper; `generate` asks for it.
    "qwen2_5_omni_thinker": {"vision_start_token_id": 151652},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 151652},
    "bloom": {"seq_length": 2048},
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "granitemoehybrid": {"layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 2) * 4},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
}


def default_entries(model_type: str) -> dict[str, Any]:
    """Return config.json of a checkpoint of this type, of full size."""
    config = CONFIG_MAPPING[model_type]().to_dict()
    nested = config.get("text_config")
    text = nested if isinstance(nested, dict) else config
    _state(text)
    if "hidden_size" in config and text is not config:
        # A wrapper that repeats a size of its text has the same number.
        text["hidden_size"] = config["hidden_size"]
    text_type = text.get("model_type")
    text_class = CONFIG_MAPPING[text_type] if text_type in CONFIG_MAPPING else None
    if "mrope_section" in (getattr(text_class, "ignore_keys_at_rope_validation", None) or ()):
        _state_sections(text)
    if text is not config:
        config |= copy.deepcopy(_STATED_BY_TYPE.get(model_type, {}))
    # A type of both kinds is one of a class that takes images.
    architectures = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    config |= {"architectures": [architectures[model_type]], "model_type": model_type}
    return json.loads(json.dumps(config, default=str))


def _state(config: dict[str, Any]) -> None:
    """Fill entries of a language model that its class leaves open."""
    for name, value in _STATED.items():
        if name in config and (config[name] is None or name.endswith("token_id")):
            config[name] = value
    if config.get("num_key_value_heads", 0) is None:
        config["num_key_value_heads"] = config["num_attention_heads"]
    if config["model_type"] == "mimo_v2_flash":
        # Checkpoints state the number that the class derives.
        config["swa_num_key_value_heads"] = 2 * config["num_key_value_heads"]
    config |= copy.deepcopy(_STATED_BY_TYPE.get(config["model_type"], {}))
    config["pad_token_id"] = 0


def _state_sections(config: dict[str, Any]) -> None:
    """Share half of a rotated head among the three axes of multi-dimensional rope."""
    rope = config["rope_parameters"]
    if any(isinstance(value, dict) for value in rope.values()):
        return
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    half = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
    rope.setdefault("mrope_section", [half - 2 * (half * 3 // 8), half * 3 // 8, half * 3 // 8])


def write_config(folder: Path, entries: dict[str, Any]) -> Path:
    """Write config.json to a new folder, and return the folder."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(entries))
    return folder
