"""Loads a checkpoint folder as a module on a device.

transformers' model is built on torch's meta device, without memory. Then each stored tensor is read to its final place
(`stored/weights.py`, `weight_mapping.py`), or to a temporary tensor and from there quantised to FP8 (`fp8.py`) or
decoded from 8 or 4 bits (`stored/encoded_weights.py`). Layers that stay in 4 bits come first, one at a time
(`w4_formats.py`). If the stored tensors and the model's do not match one to one, because transformers renames or
converts tensors while loading, transformers loads the checkpoint.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from quire.replica.checkpoint.checkpoint import check_files, weight_files
from quire.replica.checkpoint.model_spec import CheckpointError, ModelSpec, build_config
from quire.replica.checkpoint.weight_scheme import EXTRA
from quire.replica.checkpoint.wrapped_text import text_config
from quire.replica.model import w4_formats
from quire.replica.model.layers import fp8
from quire.replica.model.layers.latent_attention import absorb_latents
from quire.replica.model.layers.position_cache import pass_positions
from quire.replica.model.own_attention import has_own_attention
from quire.replica.model.packed_cache import mark_unread, unread_names
from quire.replica.model.shard_plan import shard
from quire.replica.model.sharded.rank_group import RankGroup
from quire.replica.model.sharded.shared_layers import share_biases
from quire.replica.model.stored.encoded_weights import EncodedWeight, pair_encoded
from quire.replica.model.stored.weights import (
    StoredTensor,
    list_tensors,
    load_progress,
    read_tensors,
)
from quire.replica.model.text_part import (
    auto_class,
    is_dropped,
    make_model,
    of_text,
    renamed_tensors,
    tensors_to_divide,
    text_class,
)
from quire.replica.model.weight_mapping import (
    ModelMemory,
    WeightTarget,
    check_kinds,
    is_scale,
    map_weights,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

# Older checkpoints store tensors that the model computes.
_DERIVED = re.compile(r".*rotary_emb\.inv_freq")


def load_model(
    spec: ModelSpec,
    device: str,
    dtype: str,
    weights: str = "auto",
    group: RankGroup | None = None,
    num_splits: int = 1,
    unread: frozenset[str] = frozenset(),
) -> nn.Module:
    """Load transformers' model with the checkpoint's weights and Quire's attention.

    Apart from the model, the host needs at most two staging buffers of 64 MiB (`stored/weights.py`).

    Parameters
    ----------
    device
        cpu or cuda.
    dtype
        float32, bfloat16 or float16; weights are converted to it.
    weights
        "fp8" makes linear layers FP8, with the checkpoint's codes if it has such; other values change nothing here.
        Without "fp8", and in experts, the weights of an FP8 checkpoint are decoded to `dtype`.
    group, num_splits
        The ranks that compute the model together, and `reduction_splits`; only this rank's part is loaded.
    unread
        Parameters whose weights are not needed, if the loader can leave them out; they are zero then, and `mark_unread`
        notes them.

    Returns
    -------
    The model in eval mode, without gradients.

    Raises
    ------
    CheckpointError
        `check_files` rejects the files, stored tensors and the model's tensors do not match one to one, or a weight
        holds NaN.
    """
    check_files(spec.path)
    torch_dtype = getattr(torch, dtype)
    model = empty_model(spec, dtype)
    _keep_in_float32(model, torch_dtype)
    stored = list_tensors(weight_files(spec.path))
    stored = {name: t for name, t in stored.items() if not _is_left_out(name, spec)}
    renamed = renamed_tensors(model, stored)
    stored = stored if renamed is None else renamed
    stored = _without_ignored(model, stored)
    if num_splits > 1:
        named = None if renamed is None else tensors_to_divide(model, stored)
        if named is None:
            raise CheckpointError(
                f"{spec.path}: tensor_parallel: transformers converts tensors of {spec.architecture} while it loads "
                "them"
            )
        group = RankGroup() if group is None else group
        block = None if spec.scheme is None else spec.scheme.block
        w4 = None if spec.w4 is None else spec.w4.method
        stored = shard(model, named, *shard_facts(spec), group, num_splits, block, w4)
    encoded: dict[str, EncodedWeight] = {}
    if spec.scheme is not None and spec.scheme.has_weights:
        kept = _put_coded(model, stored, spec, torch_dtype, weights)
        stored, encoded = pair_encoded(stored, spec.scheme, kept)
    elif spec.w4 is not None:
        stored = w4_formats.put_layers(model, stored, spec.w4, torch.device(device), torch_dtype)
    else:
        if weights == "fp8":
            _put(model, fp8.fitting_layers(model), fp8.Fp8Linear)
        check_kinds(model, stored)
    places = None if renamed is None else map_weights(model, stored)
    if places is not None:
        _stream(model, stored, encoded, places, torch.device(device), unread)
        model = model.eval().requires_grad_(False)
    elif (
        num_splits > 1
        or spec.w4 is not None
        or (spec.scheme is not None and spec.scheme.has_weights)
    ):
        raise CheckpointError(_mismatch(model, stored, spec))
    else:
        model = _load_by_transformers(spec, torch_dtype).to(device).eval().requires_grad_(False)
        if weights == "fp8":
            fp8.put_quantised(model)
    pass_positions(model)
    share_biases(model)
    absorb_latents(model, spec, torch_dtype)
    _check_numbers(model, spec)
    return model


def empty_model(spec: ModelSpec, dtype: str) -> nn.Module:
    """Build transformers' model with Quire's attention on the meta device, without memory."""
    from quire.replica.model.attention import register

    register()
    return make_model(build_config(spec.raw_config), getattr(torch, dtype), _attention_name(spec))


def shard_facts(spec: ModelSpec) -> tuple[PretrainedConfig, dict[int, tuple[int, int]]]:
    """Return configuration and head sizes of a checkpoint, as `shard` takes them."""
    config = text_config(build_config(spec.raw_config))
    return config, {i: (kind.head_dim, kind.value_size) for i, kind in spec.kv_kinds.items()}


def _attention_name(spec: ModelSpec) -> str:
    """Return the name of Quire's attention, or of a class's own, for `attn_implementation`."""
    from quire.replica.model.attention import ATTENTION_NAME

    return "eager" if has_own_attention(spec) else ATTENTION_NAME


def _keep_in_float32(model: nn.Module, dtype: torch.dtype) -> None:
    """Set the dtype of tensors that transformers keeps in float32 for some classes, in a model on the meta device."""
    plan = model._get_dtype_plan(dtype)
    for pattern, kept in plan.items():
        for name, tensor in model.state_dict().items():
            if re.search(pattern.replace("*", ".*"), name):
                _assign(model, name, tensor.to(kept))


def _is_left_out(name: str, spec: ModelSpec) -> bool:
    """Whether a stored tensor is skipped, because the model has no such tensor."""
    return bool(_DERIVED.fullmatch(name) or (spec.scheme is not None and EXTRA.fullmatch(name)))


def _without_ignored(model: nn.Module, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Drop the tensors that the class names as surplus: projections of layers that read another layer's keys."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None)
    if not patterns:
        return stored
    surplus = re.compile("|".join(f"(?:{pattern})" for pattern in sorted(patterns)))
    own = model.state_dict().keys()
    return {name: t for name, t in stored.items() if name in own or not surplus.search(name)}


def _put_coded(
    model: nn.Module,
    stored: Mapping[str, StoredTensor],
    spec: ModelSpec,
    dtype: torch.dtype,
    weights: str,
) -> list[str]:
    """Put layers in 8 bits where the checkpoint has codes that can be multiplied; return their weights' names."""
    scheme = spec.scheme
    assert scheme is not None
    if scheme.code == "fp8" and weights == "fp8":
        kind: type[fp8.CodedLinear] = fp8.Fp8Linear
    elif scheme.code == "int8" and dtype == torch.bfloat16:
        kind = fp8.Int8Linear
    else:
        if weights == "fp8":  # a checkpoint in MXFP4, whose other layers are not coded
            _put(model, fp8.fitting_layers(model), fp8.Fp8Linear)
        return []
    if not scheme.is_multiplied:
        return []
    fits = set(fp8.fitting_layers(model, with_head=True))
    coded = [n.removesuffix(".weight") for n, t in stored.items() if t.dtype == kind.codes]
    names = [name for name in coded if name in fits]
    if scheme.has_fixed_activations:
        logger.info(
            "%s: fixed scales of activations are not used, each token gets its own", spec.path
        )
    _put(model, names, kind, scheme.activation_bound)
    return [f"{name}.weight" for name in names]


def _put(
    model: nn.Module, names: list[str], kind: type[fp8.CodedLinear], bound: float | None = None
) -> None:
    fp8.put_empty(model, names, kind, bound)
    elements = sum(model.get_submodule(name).weight.numel() for name in names)
    total = sum(parameter.numel() for parameter in model.parameters())
    logger.info(
        "%d linear layers in %s, %.0f%% of the model's parameters",
        len(names),
        "FP8" if kind is fp8.Fp8Linear else "int8",
        100 * elements / total,
    )


def _check_numbers(model: nn.Module, spec: ModelSpec) -> None:
    """Raise if a weight holds NaN, which would make every result NaN. A norm is NaN if one of its terms is."""
    unread = unread_names(model)
    for name, parameter in model.named_parameters():
        if name in unread:
            continue
        if parameter.dtype == fp8.CODES:
            has_nan = bool(((parameter.view(torch.uint8) & 0x7F) == 0x7F).any())
        else:
            has_nan = parameter.is_floating_point() and bool(
                torch.linalg.vector_norm(parameter).isnan()
            )
        if has_nan:
            raise CheckpointError(
                f"{spec.path}: {name} holds NaN, so every result would be NaN; the checkpoint is damaged"
            )


def _mismatch(model: nn.Module, stored: Mapping[str, StoredTensor], spec: ModelSpec) -> str:
    # Tensors of layers in 4 bits are read already.
    state = {name for name, tensor in model.state_dict().items() if tensor.is_meta}
    surplus, missing = sorted(stored.keys() - state), sorted(state - stored.keys())
    return (
        f"{spec.path}: stored in 8 or 4 bits, or divided among ranks, and its tensors are not those of "
        f"{spec.architecture}: surplus {', '.join(surplus[:3]) or 'none'}; missing {', '.join(missing[:3]) or 'none'}"
    )


def _stream(
    model: nn.Module,
    stored: Mapping[str, StoredTensor],
    encoded: Mapping[str, EncodedWeight],
    places: Mapping[str, WeightTarget],
    device: torch.device,
    unread: frozenset[str],
) -> None:
    memory = ModelMemory(model, device, unread)
    mark_unread(model, unread)
    filled = dict.fromkeys(place.name for place in places.values())
    # Allocate the model's tensors before any temporary tensor; alternating allocations would fragment the heap.
    for name in filled:
        memory.tensor(name)
        if memory.state[name].dtype == fp8.CODES:
            memory.tensor(f"{name}_scale")
    codes = {weight.codes.name: name for name, weight in encoded.items()}
    scales = {weight.scales.name for weight in encoded.values()}

    def is_read_elsewhere(tensor: StoredTensor) -> bool:
        """Whether a tensor is read to temporary memory, not to its final place.

        This holds for scales, which the host checks, and for tensors to be quantised or decoded.
        """
        if tensor.name in codes:
            return True
        place = places[tensor.name]
        to_codes = memory.state[place.name].dtype == fp8.CODES and tensor.dtype != fp8.CODES
        return to_codes or is_scale(place, memory.state)

    ordered = [
        tensor
        for tensor in _read_order(stored, encoded)
        if tensor.name not in places or places[tensor.name].name not in unread
    ]
    # Tensors to quantise or to decode share one temporary buffer.
    largest = max(
        (t.num_bytes for t in ordered if t.name not in scales and is_read_elsewhere(t)), default=0
    )
    elsewhere = torch.empty(largest, dtype=torch.uint8, device=device)

    def make_target(tensor: StoredTensor) -> torch.Tensor:
        if tensor.name in scales:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        if tensor.name in codes:
            return elsewhere[: tensor.num_bytes].view(tensor.dtype).view(tensor.shape)
        place = places[tensor.name]
        if not is_read_elsewhere(tensor):
            return memory.tensor(place.name)[place.index]
        if is_scale(place, memory.state):
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        return elsewhere[: tensor.num_bytes].view(tensor.dtype).view(tensor.shape)

    total_bytes = sum(t.num_bytes for t in ordered)
    own_scales = torch.empty(0)
    with load_progress(total_bytes) as on_bytes:
        for tensor, value in read_tensors(ordered, make_target, on_bytes=on_bytes):
            if tensor.name in scales:
                own_scales = value  # of the codes that are read next
                continue
            if tensor.name in codes:
                own = codes[tensor.name]
                target = memory.tensor(places[own].name)[places[own].index]
                encoded[own].decode(value, own_scales, target)
                continue
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
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
    for name in model.all_tied_weights_keys:
        model.get_parameter(name)._is_hf_initialized = True
    # Some classes set the padding token's row of a marked tensor to zero, unless the module is marked too.
    for module in model.modules():
        held = [*module.parameters(recurse=False)]
        if (
            held
            and not module._buffers
            and all(getattr(p, "_is_hf_initialized", False) for p in held)
        ):
            module._is_hf_initialized = True
    model.initialize_weights()
    model.tie_weights(missing_keys=set(memory.state) - filled.keys(), recompute_mapping=False)
    empty = [n for n, p in model.state_dict().items() if p.device.type == "meta"]
    if empty:
        raise CheckpointError(f"no stored tensor for {empty[0]!r} and {len(empty) - 1} more")


def _read_order(
    stored: Mapping[str, StoredTensor], encoded: Mapping[str, EncodedWeight]
) -> Iterator[StoredTensor]:
    """Yield the tensors to read, in storage order, with the scales of codes before them."""
    for name, tensor in stored.items():
        if name in encoded:
            yield encoded[name].scales
            yield encoded[name].codes
        else:
            yield tensor


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
    config = build_config(spec.raw_config)
    is_wrapper = text_config(config) is not config
    attention = _attention_name(spec)
    model, report = (text_class if is_wrapper else auto_class)(config).from_pretrained(
        spec.path,
        config=config,
        dtype=dtype,
        attn_implementation=of_text(attention) if is_wrapper else attention,
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
