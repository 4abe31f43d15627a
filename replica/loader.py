"""From a checkpoint folder to a module on a device."""

from __future__ import annotations

import re

import torch

from quire.replica.checkpoint import check_files
from quire.replica.spec import CheckpointError, ModelSpec

# Older checkpoints store what the model computes for itself.
_DERIVED = re.compile(r".*rotary_emb\.inv_freq")


def load_model(spec: ModelSpec, device: str, dtype: str) -> torch.nn.Module:
    """transformers' own model with the checkpoint's weights and Quire's attention.

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
    from transformers import AutoModelForCausalLM

    from quire.replica.attention import ATTENTION_NAME, register

    check_files(spec.path)
    register()
    model, report = AutoModelForCausalLM.from_pretrained(
        spec.path,
        dtype=getattr(torch, dtype),
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
    return model.to(device).eval().requires_grad_(False)
