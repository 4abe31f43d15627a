"""The text part of a checkpoint whose class takes images too: which entries of config.json describe it.

```
 config.json                                  what transformers gets
   model_type, tie_word_embeddings, ...         the same
   text_config: {model_type, hidden_size, ..}   the same, checked as the entries of a causal model are
   vision_config: {..}, audio_config: {..}      widths that must agree with the text's; else the class's own defaults,
                                                whose modules are dropped
```

Older checkpoints of some classes have the text's entries beside `vision_config`; transformers reads both forms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

TEXT = "text_config"
_JOINT_SIZES = ("out_hidden_size", "text_hidden_size")


def wrapper_class(model_type: str) -> str | None:
    """Return transformers' class for text and images of a model type, if its configuration nests the text's."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    name = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(model_type)
    return name if name and TEXT in CONFIG_MAPPING[model_type].sub_configs else None


def causal_class(model_type: str) -> str | None:
    """Return transformers' causal class of a model type. It lists a few only among those that take images too."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    other = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(model_type, "")
    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type) or (
        other if other.endswith("ForCausalLM") else None
    )


def is_wrapper(raw: dict[str, Any]) -> bool:
    """Whether config.json, which names one architecture, is one of a class for text and images."""
    return raw["architectures"] == [wrapper_class(raw["model_type"])]


def text_entries(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of the nested text configuration; {}: there is none.

    Raises
    ------
    ValueError
        It is not an object, or its model type is not one of a language model.
    """
    from transformers import CONFIG_MAPPING

    if not is_wrapper(raw) or raw.get(TEXT) is None:
        return {}
    text = raw[TEXT]
    if not isinstance(text, dict):
        raise ValueError(f"{TEXT} must be an object, is {type(text).__name__}")
    model_type = text.get("model_type")
    if model_type is None:
        # The class's own.
        return text
    config_class: Any = None
    if isinstance(model_type, str) and model_type in CONFIG_MAPPING:
        config_class = CONFIG_MAPPING[model_type]
    is_text = config_class is not None and (
        causal_class(model_type) is not None
        or getattr(config_class, "base_config_key", None) == TEXT
        or config_class is CONFIG_MAPPING[raw["model_type"]].sub_configs[TEXT]
    )
    if not is_text or config_class.sub_configs:
        raise ValueError(f"{TEXT}: model_type {model_type!r} is not one of a language model")
    return text


def wrapper_entries(
    raw: dict[str, Any], own_entries: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """Return the entries from which transformers builds the configuration of a wrapper.

    Parameters
    ----------
    raw
        config.json.
    own_entries
        Leaves out entries that make transformers read or run other files.
    """
    from transformers import CONFIG_MAPPING

    nested = CONFIG_MAPPING[raw["model_type"]].sub_configs
    entries = {name: value for name, value in own_entries(raw).items() if name not in nested}
    for name in nested:
        if name != TEXT and (sizes := joint_sizes(raw.get(name))):
            entries[name] = sizes
    text = text_entries(raw)
    return {**entries, TEXT: own_entries(text)} if text else entries


def joint_sizes(other: Any) -> dict[str, int]:
    """Return the sizes of a nested configuration that must agree with the text's: widths of what it passes on."""
    entries = other if isinstance(other, dict) else {}
    return {name: entries[name] for name in _JOINT_SIZES if type(entries.get(name)) is int}


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of the language model: the nested one of a wrapper, else the configuration itself."""
    return getattr(config, TEXT) if TEXT in type(config).sub_configs else config
