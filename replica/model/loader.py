"""Loads a checkpoint folder as a module on a device.

transformers' model is built on torch's meta device, without memory. Then each stored tensor is read to its final place
(`weights.py`, `weight_mapping.py`), or to a temporary tensor and from there quantised to FP8 (`fp8.py`).
Layers that are stored in 4 bits come first, one at a time (`w4_formats.py`). If the stored
tensors and the model's do not match one to one, because transformers renames or converts tensors while loading,
transformers loads the checkpoint.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

import torch
from torch import nn

from quire.replica.checkpoint.checkpoint import check_files, weight_files
from quire.replica.checkpoint.fp8_checkpoint import EXTRA
from quire.replica.checkpoint.model_spec import CheckpointError, ModelSpec, build_config
from quire.replica.checkpoint.wrapped_text import text_config
from quire.replica.model import fp8, w4_formats
from quire.replica.model.latent_attention import absorb_latents
from quire.replica.model.position_cache import pass_positions
from quire.replica.model.text_part import (
    is_dropped,
    make_model,
    of_text,
    renamed_tensors,
    text_class,
)
from quire.replica.model.weight_mapping import (
    ModelMemory,
    WeightTarget,
    check_kinds,
    is_scale,
    map_weights,
)
from quire.replica.model.weights import StoredTensor, list_tensors, load_progress, read_tensors

logger = logging.getLogger(__name__)

# Older checkpoints store tensors that the model computes.
_DERIVED = re.compile(r".*rotary_emb\.inv_freq")


def load_model(spec: ModelSpec, device: str, dtype: str, weights: str = "auto") -> nn.Module:
    """Load transformers' model with the checkpoint's weights and Quire's attention.

    Apart from the model, the host needs at most two staging buffers of 64 MiB (`weights.py`).

    Parameters
    ----------
    device
        cpu or cuda.
    dtype
        float32, bfloat16 or float16; weights are converted to it.
    weights
        "fp8" makes linear layers FP8 and is required for checkpoints stored in FP8; other values change nothing here.

    Returns
    -------
    The model in eval mode, without gradients.

    Raises
    ------
    CheckpointError
        `check_files` rejects the files, or stored tensors and the model's tensors do not match one to one.
    """
    check_files(spec.path)
    torch_dtype = getattr(torch, dtype)
    stored = list_tensors(weight_files(spec.path))
    stored = {name: t for name, t in stored.items() if not _is_left_out(name, spec)}
    model = empty_model(spec, dtype)
    renamed = renamed_tensors(model, stored)
    stored = stored if renamed is None else renamed
    stored = _without_ignored(model, stored)
    if weights == "fp8":
        _put_fp8(model, stored, spec)
    if not (spec.raw_config.get("quantization_config") or spec.fp8):
        check_kinds(model, stored)
    if spec.w4 is not None:
        stored = w4_formats.put_layers(model, stored, spec.w4, torch.device(device), torch_dtype)
    # For some architectures, transformers keeps some tensors in float32 while it converts the others.
    is_converted = renamed is None or model._get_dtype_plan(torch_dtype)
    places = None if is_converted else map_weights(model, stored)
    if places is not None:
        _stream(model, stored, places, torch.device(device))
        pass_positions(model)
        absorb_latents(model, spec, torch_dtype)
        return model.eval().requires_grad_(False)
    if spec.w4 is not None or (spec.fp8 is not None and spec.fp8.has_weights):
        raise CheckpointError(_mismatch(model, stored, spec))
    model = _load_by_transformers(spec, torch_dtype).to(device).eval().requires_grad_(False)
    pass_positions(model)
    if weights == "fp8":
        fp8.put_quantised(model)
    absorb_latents(model, spec, torch_dtype)
    return model


def empty_model(spec: ModelSpec, dtype: str) -> nn.Module:
    """Build transformers' model with Quire's attention on the meta device, without memory."""
    from quire.replica.model.attention import ATTENTION_NAME, register

    register()
    return make_model(build_config(spec.raw_config), getattr(torch, dtype), ATTENTION_NAME)


def _is_left_out(name: str, spec: ModelSpec) -> bool:
    """Whether a stored tensor is skipped, because the model has no such tensor."""
    return bool(_DERIVED.fullmatch(name) or (spec.fp8 is not None and EXTRA.fullmatch(name)))


def _without_ignored(model: nn.Module, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Drop the tensors that the class names as surplus: projections of layers that read another layer's keys."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None)
    if not patterns:
        return stored
    surplus = re.compile("|".join(f"(?:{pattern})" for pattern in sorted(patterns)))
    own = model.state_dict().keys()
    return {name: t for name, t in stored.items() if name in own or not surplus.search(name)}


def _put_fp8(model: nn.Module, stored: Mapping[str, StoredTensor], spec: ModelSpec) -> None:
    """Put FP8 layers where the checkpoint has them, or wherever they fit if it has none."""
    names = fp8.fitting_layers(model)
    if spec.fp8 is not None and spec.fp8.has_weights:
        linear = {n for n, module in model.named_modules() if type(module) is nn.Linear}
        coded = [n.removesuffix(".weight") for n, t in stored.items() if t.dtype == fp8.CODES]
        names = [name for name in coded if name in linear]
        if spec.fp8.has_fixed_activations:
            logger.info(
                "%s: fixed scales of activations are not used, each token gets its own", spec.path
            )
    fp8.put_empty(model, names, spec.fp8.activation_bound if spec.fp8 is not None else None)
    elements = sum(model.get_submodule(name).weight.numel() for name in names)
    total = sum(parameter.numel() for parameter in model.parameters())
    logger.info(
        "%d linear layers in FP8, %.0f%% of the model's parameters",
        len(names),
        100 * elements / total,
    )


def _mismatch(model: nn.Module, stored: Mapping[str, StoredTensor], spec: ModelSpec) -> str:
    # Tensors of layers in 4 bits are read already.
    state = {name for name, tensor in model.state_dict().items() if tensor.is_meta}
    surplus, missing = sorted(stored.keys() - state), sorted(state - stored.keys())
    return (
        f"{spec.path}: stored in {'FP8' if spec.w4 is None else '4 bits'}, and its tensors are not those of "
        f"{spec.architecture}: surplus "
        f"{', '.join(surplus[:3]) or 'none'}; missing {', '.join(missing[:3]) or 'none'}"
    )


def _stream(
    model: nn.Module,
    stored: Mapping[str, StoredTensor],
    places: Mapping[str, WeightTarget],
    device: torch.device,
) -> None:
    memory = ModelMemory(model, device)
    filled = dict.fromkeys(place.name for place in places.values())
    # Allocate the model's tensors before any temporary tensor; alternating allocations would fragment the heap.
    for name in filled:
        memory.tensor(name)
        if memory.state[name].dtype == fp8.CODES:
            memory.tensor(f"{name}_scale")

    def is_read_elsewhere(tensor: StoredTensor) -> bool:
        """Whether a tensor is read to temporary memory, not to its final place.

        This holds for scales, which the host checks, and for tensors to be quantised.
        """
        place = places[tensor.name]
        to_codes = memory.state[place.name].dtype == fp8.CODES and tensor.dtype != fp8.CODES
        return to_codes or is_scale(place, memory.state)

    # Tensors to quantise share one temporary buffer.
    largest = max((t.num_bytes for t in stored.values() if is_read_elsewhere(t)), default=0)
    elsewhere = torch.empty(largest, dtype=torch.uint8, device=device)

    def make_target(tensor: StoredTensor) -> torch.Tensor:
        place = places[tensor.name]
        if not is_read_elsewhere(tensor):
            return memory.tensor(place.name)[place.index]
        if is_scale(place, memory.state):
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        return elsewhere[: tensor.num_bytes].view(tensor.dtype).view(tensor.shape)

    total_bytes = sum(t.num_bytes for t in stored.values())
    with load_progress(total_bytes) as on_bytes:
        for tensor, value in read_tensors(stored.values(), make_target, on_bytes=on_bytes):
            name = places[tensor.name].name
            if is_scale(places[tensor.name], memory.state):
                _check_scales(tensor, value)
                memory.tensor(name).copy_(value.float().reshape(-1, 1))
            elif is_read_elsewhere(tensor):
                fp8.quantise_into(value, memory.tensor(name), memory.tensor(f"{name}_scale"))
    for name, value in memory.made.items():
        _assign(model, name, value)
    # Buffers that the model computes, such as RoPE's inverse frequencies, are not stored. `initialize_weights` fills
    # them; it skips tensors that are marked as initialised.
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.device.type == "meta":
                module._buffers[name] = torch.empty_like(buffer, device=device)
    for name in model.all_tied_weights_keys:
        model.get_parameter(name)._is_hf_initialized = True
    # Some classes set the padding token's row of a marked tensor to zero, unless the module is marked too.
    for module in model.modules():
        own = [*module.parameters(recurse=False)]
        if (
            own
            and not module._buffers
            and all(getattr(p, "_is_hf_initialized", False) for p in own)
        ):
            module._is_hf_initialized = True
    model.initialize_weights()
    model.tie_weights(missing_keys=set(memory.state) - filled.keys(), recompute_mapping=False)
    empty = [n for n, p in model.state_dict().items() if p.device.type == "meta"]
    if empty:
        raise CheckpointError(f"no stored tensor for {empty[0]!r} and {len(empty) - 1} more")


def _check_scales(tensor: StoredTensor, value: torch.Tensor) -> None:
    scales = value.float()
    if not (torch.isfinite(scales) & (scales > 0)).all():
        raise CheckpointError(
            f"{tensor.file}: {tensor.name!r} must be finite and positive, is between {scales.min()} and "
            f"{scales.max()}"
        )


def _assign(model: nn.Module, name: str, value: torch.Tensor) -> None:
    parent_name, _, own_name = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    if own_name in parent._parameters:
        value = nn.Parameter(value, requires_grad=False)
        parent._parameters[own_name] = value
    else:
        parent._buffers[own_name] = value
    value._is_hf_initialized = True


def _load_by_transformers(spec: ModelSpec, dtype: torch.dtype) -> nn.Module:
    from transformers import AutoModelForCausalLM

    from quire.replica.model.attention import ATTENTION_NAME

    config = build_config(spec.raw_config)
    is_wrapper = text_config(config) is not config
    model, report = (text_class(config) if is_wrapper else AutoModelForCausalLM).from_pretrained(
        spec.path,
        config=config,
        dtype=dtype,
        attn_implementation=of_text(ATTENTION_NAME) if is_wrapper else ATTENTION_NAME,
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=False,
        ignore_mismatched_sizes=True,  # so that the report lists them; rejected below
        output_loading_info=True,
    )
    # transformers only warns of missing tensors, which it fills with random numbers, and of surplus tensors.
    surplus = [
        name
        for name in report["unexpected_keys"]
        if not _DERIVED.fullmatch(name) and not is_dropped(model, name)
    ]
    problems = {
        "missing": report["missing_keys"],
        "surplus": surplus,
        "misshapen": report["mismatched_keys"],
    }
    for kind, names in problems.items():
        if names:
            first = ", ".join(sorted(map(str, names))[:3])
            raise CheckpointError(
                f"{spec.path}: {len(names)} {kind} tensors for {spec.architecture}: {first}"
            )
    return model
