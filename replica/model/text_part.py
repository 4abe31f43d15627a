"""The model to load for a checkpoint: a causal class, or the text part of a class that takes images too.

```
 LlavaForConditionalGeneration            the same class, without what only images need
   model: LlavaModel                        model: LlavaModel
     vision_tower                             None
     multi_modal_projector                    None
     language_model: LlamaModel               language_model: LlamaModel
   lm_head                                  lm_head
```

The class stays transformers' own, so its forward pass, its names of tensors and its rules for older checkpoints hold.
A causal class is its own text part: nothing is dropped.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from quire.replica.checkpoint.checkpoint import weight_files
from quire.replica.checkpoint.model_spec import CheckpointError, ModelSpec, build_config
from quire.replica.checkpoint.wrapped_text import text_config
from quire.replica.model.stored.expert_names import expert_name
from quire.replica.model.stored.weights import StoredTensor, list_tensors
from quire.replica.model.transformers_import import without_compiler

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_PATHS = "quire_paths"  # attribute of a text part: its `TextPaths`
# While a model is made, transformers sets the dtype of the process, and classes are changed here. Ranks may be threads.
_MAKING = threading.Lock()


@dataclasses.dataclass(frozen=True, slots=True)
class TextPaths:
    """Where a text part has its modules."""

    causal: str  # from the wrapper to `causal_model`
    decoder: str  # from there to the decoder
    head: str  # from the wrapper
    dropped: tuple[str, ...]  # beginnings of the names of tensors that are not loaded


def make_model(config: PretrainedConfig, dtype: torch.dtype, attention: str) -> nn.Module:
    """Return the model for a checkpoint's configuration on the meta device, without modules for images.

    Raises
    ------
    CheckpointError
        The class has no language model apart from its output head.
    """

    def make(*modes: TorchFunctionMode) -> nn.Module:
        with ExitStack() as stack:
            for mode in (torch.device("meta"), *modes):
                stack.enter_context(mode)
            if text_config(config) is config:
                return auto_class(config).from_config(
                    config, dtype=dtype, attn_implementation=attention
                )
            return text_class(config)._from_config(
                config, dtype=dtype, attn_implementation=of_text(attention)
            )

    def make_fast() -> nn.Module:
        try:
            return make(_RangesOnHost()).to("meta")
        except RuntimeError:
            # The class combines a range with a tensor on the meta device.
            return make()

    with _MAKING:
        return without_compiler(make_fast)


class _RangesOnHost(TorchFunctionMode):
    """Inside `torch.device("meta")`: avoids operations for which torch imports sympy, which takes half a second.

    Their shapes on the meta device are computed by Python code of torch. A model's constructor calls `torch.arange` for
    RoPE, and fills embeddings, which have no content there.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is nn.init.normal_:
            return args[0] if args else kwargs["tensor"]
        if func is torch.arange and kwargs.get("device") is None:
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def auto_class(config: PretrainedConfig) -> Any:
    """Return transformers' maker of the causal class of a configuration."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    is_listed = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForCausalLM if is_listed else AutoModelForImageTextToText


def model_class(config: PretrainedConfig) -> Any:
    """Return transformers' class of a configuration: a causal one, or one for text and images."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    )

    is_causal = text_config(config) is config and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    mapping = MODEL_FOR_CAUSAL_LM_MAPPING if is_causal else MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return mapping[type(config)]


def of_text(attention: str) -> dict[str, str]:
    """Return the option of transformers that chooses an attention for the text part only."""
    return {"text_config": attention}


def text_class(config: PretrainedConfig) -> Any:
    """Return the wrapper's class of a configuration as a class that drops modules for images when it is made.

    It has the wrapper's name, by which transformers finds its rules for names of tensors.
    """
    wrapper = model_class(config)

    def init(self: nn.Module, config: PretrainedConfig, *args: object, **options: object) -> None:
        try:
            wrapper.__init__(self, config, *args, **options)
        except Exception:  # a library that only images need is missing, or a class's defaults for images do not fit
            with _text_models_only(text_config(config)):
                wrapper.__init__(self, config, *args, **options)
        setattr(self, _PATHS, _drop_others(self))

    def get_output_embeddings(self: nn.Module) -> nn.Module | None:
        if is_text_part(self):
            return self.get_submodule(getattr(self, _PATHS).head)
        return wrapper.get_output_embeddings(self)

    members = {
        "__init__": init,
        "__module__": wrapper.__module__,
        "get_output_embeddings": get_output_embeddings,
    }
    return type(wrapper.__name__, (wrapper,), members)


@contextmanager
def _text_models_only(text: PretrainedConfig) -> Iterator[None]:
    """Let `AutoModel.from_config` make placeholders of all configurations but the text's."""
    from transformers import AutoModel

    make = AutoModel.from_config

    def from_config(config: PretrainedConfig, **options: object) -> nn.Module:
        # A list has a parameter, by which classes find their dtype.
        return make(config, **options) if config is text else nn.ParameterList([torch.empty(0)])

    AutoModel.from_config = from_config
    try:
        yield
    finally:
        del AutoModel.from_config


def is_text_part(model: nn.Module) -> bool:
    """Whether a model is made by `text_class`."""
    return hasattr(model, _PATHS)


def causal_model(model: nn.Module) -> nn.Module:
    """Return the module whose forward pass gives logits for tokens: a model from `make_model`, or a causal one within.

    Some wrappers have a causal model of their own, whose logits they return.
    """
    return model.get_submodule(getattr(model, _PATHS).causal) if is_text_part(model) else model


def split_at_decoder(
    model: nn.Module, instead: Callable[[nn.Module], nn.Module]
) -> tuple[nn.Module, nn.Module]:
    """Return the decoder of a model from `make_model`, and a copy of the causal model with another in its place.

    The copy calls `instead(decoder)` for its child that is or holds the decoder.
    Both results share the model's modules.
    """
    causal = causal_model(model)
    path = getattr(model, _PATHS).decoder if is_text_part(model) else _base_path(model)
    copied = copy.copy(causal)
    decoder = causal.get_submodule(path)
    copied._modules = {**causal._modules, path.split(".")[0]: instead(decoder)}
    return decoder, copied


def _base_path(model: nn.Module) -> str:
    """Return the name of a causal model's decoder, which a few classes state wrongly."""
    name = model.base_model_prefix
    if not hasattr(model, name):
        return _language_models(model)[-1][0]
    # The head of some classes calls the decoder within its base model.
    is_within = getattr(getattr(model, name), "decoder", None) is model.get_decoder()
    return f"{name}.decoder" if is_within else name


def is_dropped(model: nn.Module, name: str) -> bool:
    """Whether a tensor of this name, as the model names it, belongs to a module for images."""
    return is_text_part(model) and name.startswith(getattr(model, _PATHS).dropped)


def renamed_tensors(
    model: nn.Module, stored: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor] | None:
    """Return the stored tensors that the text part needs, by its own names; None: transformers converts some of them.

    Tensors of a causal class keep their names.
    """
    if not is_text_part(model):
        return dict(stored)
    from transformers.core_model_loading import WeightConverter

    names = _model_names(model, stored)
    state = model.state_dict()
    converters = [rule for rule in _rules(model) if isinstance(rule, WeightConverter)]
    # A converter that takes the model's own names changes values, such as their order.
    if any(
        c.rename_source_key(name)[1] for name in names.values() if name in state for c in converters
    ):
        return None
    return {new: dataclasses.replace(stored[name], name=new) for name, new in names.items()}


def tensors_to_divide(
    model: nn.Module, stored: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor] | None:
    """Return what ranks read parts of, by the model's names; None: transformers converts some of the tensors.

    A rank reads a mixture's experts one by one if they are stored so: `expert_name`.

    Parameters
    ----------
    stored
        Result of `renamed_tensors`.
    """
    from transformers.core_model_loading import WeightConverter

    names = {name: name for name in stored} if is_text_part(model) else _model_names(model, stored)
    state = model.state_dict()
    converters = [rule for rule in _rules(model) if isinstance(rule, WeightConverter)]
    found: dict[str, StoredTensor] = {}
    for old, name in names.items():
        converter = None
        if name not in state:
            converter = next((c for c in converters if c.rename_source_key(name)[1]), None)
        own = name if converter is None else expert_name(name, converter)
        if own is None:
            return None
        found[own] = stored[old].named(own)
    return found


def text_tensor_names(spec: ModelSpec) -> frozenset[str] | None:
    """Return the stored names of the tensors that are loaded; None: all of them."""
    config = build_config(spec.raw_config)
    if text_config(config) is config:
        return None
    model = make_model(config, torch.float32, "eager")
    return frozenset(_model_names(model, list_tensors(weight_files(spec.path))))


def _model_names(model: nn.Module, stored: Mapping[str, object]) -> dict[str, str]:
    """Map the stored names of tensors that are not dropped to the model's names, by transformers' rules."""
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    renamings = [rule for rule in _rules(model) if isinstance(rule, WeightRenaming)]
    state = model.state_dict()
    names = {
        name: rename_source_key(name, renamings, [], model.base_model_prefix, state)[0]
        for name in stored
    }
    return {name: new for name, new in names.items() if not is_dropped(model, new)}


def _rules(model: nn.Module) -> list:
    from transformers.conversion_mapping import get_model_conversion_mapping

    return get_model_conversion_mapping(model)


def _language_models(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return paths and models of transformers that hold the token embedding, from the wrapper to the decoder."""
    from transformers import PreTrainedModel

    embedding = model.get_input_embeddings()
    return [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, PreTrainedModel) and embedding in module.modules()
    ]


def _drop_others(model: nn.Module) -> TextPaths:
    """Set to None what neither belongs to the language model or the output head nor holds them."""
    models = _language_models(model)
    path, decoder = models[-1]
    # Some wrappers have the head in a causal model within.
    heads = (module.get_output_embeddings() for _, module in models)
    head = next((head for head in heads if head is not None), None)
    if decoder is model or head is None or head in decoder.modules():
        raise CheckpointError(
            f"{type(model).__name__} has no language model apart from its output head"
        )
    causal = [name for name, module in models if head in module.modules()][-1]
    kept = {decoder, head}
    names = {module: name for name, module in model.named_modules()}
    dropped = []
    for parent, module in list(model.named_modules()):
        if module in kept or kept.isdisjoint(module.modules()):
            continue
        for members in (module._modules, module._parameters, module._buffers):
            for name, member in list(members.items()):
                is_module = isinstance(member, nn.Module)
                if member is None or (is_module and not kept.isdisjoint(member.modules())):
                    continue
                if is_module:
                    members[name] = None
                else:
                    # Classes initialise their own tensors, so an empty one stands in its place.
                    del members[name]
                    module.__dict__[name] = torch.empty(0, device="cpu")
                dropped.append(f"{parent}.{name}".lstrip(".") + ("." if is_module else ""))
    below = path.removeprefix(f"{causal}.")
    return TextPaths(causal, below, names[head], tuple(dropped))
