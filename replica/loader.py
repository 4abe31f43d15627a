"""From a checkpoint folder to a module on a device.

transformers' model is built without memory, on torch's meta device; then each stored tensor is read to where it will
stay (`weights.py`). Checkpoints whose tensors transformers renames, merges or dequantises while loading go through
its own loader.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import nn

from quire.replica.checkpoint import check_files, weight_files
from quire.replica.spec import CheckpointError, ModelSpec
from quire.replica.weights import StoredTensor, list_tensors, load_progress, read_tensors

# Older checkpoints store what the model computes for itself.
_DERIVED = re.compile(r".*rotary_emb\.inv_freq")


def load_model(spec: ModelSpec, device: str, dtype: str) -> nn.Module:
    """transformers' own model with the checkpoint's weights and Quire's attention.

    Beside the model, the host holds two pieces of at most 64 MiB and at most the largest tensor. See `weights`.

    Parameters
    ----------
    device
        cpu or cuda.
    dtype
        float32, bfloat16 or float16: weights are converted.

    Returns
    -------
    The model in eval mode, no gradients.

    Raises
    ------
    CheckpointError
        The files are refused by `check_files`, or tensors and model do not match one to one.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from quire.replica.attention import ATTENTION_NAME, register

    check_files(spec.path)
    register()
    torch_dtype = getattr(torch, dtype)
    config = AutoConfig.from_pretrained(spec.path, local_files_only=True, trust_remote_code=False)
    stored = list_tensors(weight_files(spec.path))
    stored = {name: t for name, t in stored.items() if not _DERIVED.fullmatch(name)}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch_dtype, attn_implementation=ATTENTION_NAME
        )
    if not _is_plain(model, stored, torch_dtype):
        model = _load_by_transformers(spec, torch_dtype)
        return model.to(device).eval().requires_grad_(False)
    _stream(model, stored, torch.device(device))
    return model.eval().requires_grad_(False)


def _is_plain(model: nn.Module, stored: Mapping[str, StoredTensor], dtype: torch.dtype) -> bool:
    """Whether the stored tensors are the model's, one to one and in one dtype; tied ones may be stored once.

    What is wrong with a checkpoint that is not plain, transformers' loader finds out.
    """
    state = model.state_dict()
    tied = model.all_tied_weights_keys  # {one of the same weight: the other}
    missing = state.keys() - stored.keys()
    if any(name not in tied and name not in tied.values() for name in missing):
        return False
    if any(one in missing and other in missing for one, other in tied.items()):
        return False
    keeps_float32 = dtype != torch.float32 and (
        model._keep_in_fp32_modules or model._keep_in_fp32_modules_strict
    )
    if keeps_float32 or hasattr(model.config, "quantization_config"):
        return False
    return all(
        name in state and state[name].shape == t.shape and t.dtype is not None
        for name, t in stored.items()
    )


def _stream(model: nn.Module, stored: Mapping[str, StoredTensor], device: torch.device) -> None:
    state = model.state_dict()  # on the meta device: shapes and dtypes

    def make_target(tensor: StoredTensor) -> torch.Tensor:
        like = state[tensor.name]
        return torch.empty(like.shape, dtype=like.dtype, device=device)

    total_bytes = sum(t.num_bytes for t in stored.values())
    with load_progress(total_bytes) as on_bytes:
        for tensor, value in read_tensors(stored.values(), make_target, on_bytes=on_bytes):
            _assign(model, tensor.name, value)
    # Computed buffers, such as inverse frequencies, are not stored: transformers fills them as after its own loader,
    # leaving alone what is marked.
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.device.type == "meta":
                module._buffers[name] = torch.empty_like(buffer, device=device)
    for name in model.all_tied_weights_keys:
        model.get_parameter(name)._is_hf_initialized = True
    model.initialize_weights()
    model.tie_weights(missing_keys=set(state) - stored.keys(), recompute_mapping=False)
    empty = [n for n, p in model.state_dict().items() if p.device.type == "meta"]
    if empty:
        raise CheckpointError(f"no stored tensor for {empty[0]!r} and {len(empty) - 1} more")


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

    from quire.replica.attention import ATTENTION_NAME

    model, report = AutoModelForCausalLM.from_pretrained(
        spec.path,
        dtype=dtype,
        attn_implementation=ATTENTION_NAME,
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=False,
        ignore_mismatched_sizes=True,  # so that the report names them; refused below
        output_loading_info=True,
    )
    # transformers fills a missing tensor with random numbers and drops a surplus one, with a warning.
    surplus = [name for name in report["unexpected_keys"] if not _DERIVED.fullmatch(name)]
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
