"""Proves each class once: the verdict is kept in a file, by all that it depends on.

The key is the tiny model's configuration, which has every flag of the checkpoint's, the kind of device or ranks, and
the versions of Quire's sources, torch and transformers. The folder is `proofs` under `QUIRE_CACHE`, by default
`~/.cache/quire`. A folder that cannot be written only costs another proof at the next start.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quire.replica.builtin_model import CHECKPOINT
from quire.replica.checkpoint.cache_folder import cache_folder, sources_digest
from quire.replica.checkpoint.model_spec import CheckpointError, ModelSpec
from quire.replica.proof.first_difference import failed_module
from quire.replica.proof.model_proof import StartEngine, find_difference, tiny_entries

logger = logging.getLogger(__name__)

# Classes that the tests run through the kernels of a GPU, in Triton's interpreter. Others are proven on the GPU itself.
TESTED_FOR_GPU = frozenset(
    {
        "LlamaForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "MistralForCausalLM",
        "Olmo2ForCausalLM",
        "SmolLM3ForCausalLM",
        "GraniteForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "GptOssForCausalLM",
        "Phi3ForCausalLM",
        "Qwen3MoeForCausalLM",
    }
)


def check_model(spec: ModelSpec, device: str, start: StartEngine, with_ranks: bool = False) -> None:
    """Prove that the engine computes what transformers computes for models of this class and with these options.

    The built-in model is not proven: the tests compare it with transformers.

    Parameters
    ----------
    device
        cpu or cuda, on which the checkpoint will be served.
    start
        Starts an engine for the tiny model.
    with_ranks
        Whether the model will be divided. A plan of transformers may divide what a class computes over all features, so
        two ranks on the CPU, which are threads of this process, are compared as well.

    Raises
    ------
    CheckpointError
        The results differ, or the engine cannot run this class.
    """
    if spec.path == CHECKPOINT:
        return
    kinds = {"cpu": ("cpu", start)}
    if device == "cuda" and spec.architecture not in TESTED_FOR_GPU:
        kinds["cuda"] = ("cuda", start)
    if with_ranks:
        kinds["two ranks"] = ("cpu", in_ranks(start))
    for kind, (kind_device, start_kind) in kinds.items():
        difference = _verdict(spec, kind, kind_device, start_kind)
        if difference is not None:
            raise CheckpointError(
                f"{spec.path}: {spec.architecture} with this configuration is not served, because a tiny model of it "
                f"gives other results on {kind} than transformers: {difference}"
            )


def in_ranks(start: StartEngine) -> StartEngine:
    """Return a function that starts an engine of two ranks, the second one a thread of this process."""
    from quire.replica.ranks.leading_ranks import start_thread

    return partial(start, tensor_parallel=2, start_rank=start_thread)


def _verdict(spec: ModelSpec, kind: str, device: str, start: StartEngine) -> str | None:
    began = time.perf_counter()
    try:
        entries = tiny_entries(spec)
        key = _key(entries, kind)
        known = _read(key)
        if known is not None:
            return known["difference"]
        difference = find_difference(entries, device, start)
    except CheckpointError:
        raise
    except Exception as error:  # each class fails in its own way
        logger.info("%s: the proof failed", spec.path, exc_info=True)
        raise CheckpointError(
            f"{spec.path}: {spec.architecture} is not served: {kind} cannot run a tiny model of it: "
            f"{type(error).__name__}: {error}{failed_module(error)}"
        ) from error
    seconds = time.perf_counter() - began
    logger.info("proved %s on %s in %.1f s", spec.architecture, kind, seconds)
    _write(key, {"architecture": spec.architecture, "difference": difference})
    return difference


def _file(key: str) -> Path:
    """Return the file of a verdict. Raises RuntimeError if this user has no home folder."""
    return cache_folder() / "proofs" / f"{key}.json"


def _key(entries: dict[str, Any], kind: str) -> str:
    import transformers

    versions = [torch.__version__, transformers.__version__, sources_digest(), kind]
    text = json.dumps([versions, entries], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _read(key: str) -> dict[str, Any] | None:
    """Return a verdict, or None if there is none that can be read."""
    try:
        value = json.loads(_file(key).read_text())
    except (OSError, ValueError, RuntimeError):
        return None
    return value if isinstance(value, dict) and "difference" in value else None


def _write(key: str, verdict: dict[str, Any]) -> None:
    try:
        file = _file(key)
        file.parent.mkdir(parents=True, exist_ok=True)
        # Several replicas may write the same verdict at the same time.
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(verdict) + "\n")
        part.replace(file)
    except (OSError, RuntimeError) as error:
        logger.info("the verdict is not kept: %s", error)
