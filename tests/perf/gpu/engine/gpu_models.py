"""Models of the engine's GPU benchmark: published shapes with random weights, as sharded checkpoints on the disk.

The models are complete, with vocabulary and output head, because both are part of a step's time. The weights are drawn
tensor by tensor on the device and written shard by shard, so only one shard is in memory and the disk sets the speed. A
rehearsal has tiny models of the same architectures.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from quire.cluster.bench.engines.floor import ModelShape
from tests.perf.gpu.gpu_session import Session

SHARD_BYTES = 4 << 30
SEED = 0
_LLAMA_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Values of the published configurations.
_LLAMA_8B = dict(vocab_size=128_256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                 num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=131_072,
                 rms_norm_eps=1e-5, rope_parameters=_LLAMA_ROPE, bos_token_id=128_000, eos_token_id=128_001,
                 tie_word_embeddings=False)  # fmt: skip
_QWEN_8B = dict(vocab_size=151_936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
                num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=40_960,
                rms_norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 1e6}, bos_token_id=151_643,
                eos_token_id=151_645, tie_word_embeddings=False)  # fmt: skip
_QWEN_SMALL = _QWEN_8B | dict(
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    tie_word_embeddings=True,
)
_TINY = dict(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=16, max_position_embeddings=16_384, bos_token_id=0,
             eos_token_id=1)  # fmt: skip
_CONFIGS: dict[str, tuple[type, dict[str, Any]]] = {
    "Llama-3.1-8B": (transformers.LlamaConfig, _LLAMA_8B),
    "Qwen3-8B": (transformers.Qwen3Config, _QWEN_8B),
    "Qwen3-0.6B": (transformers.Qwen3Config, _QWEN_SMALL),
}
NAMES = tuple(_CONFIGS)
LARGE = ("Llama-3.1-8B", "Qwen3-8B")
SMALL = "Qwen3-0.6B"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on the disk."""

    path: Path
    dtype: str
    vocab_size: int
    shape: ModelShape


def checkpoint(folder: Path, name: str, session: Session) -> Checkpoint:
    """A model in this folder, written if it does not exist: in bfloat16, or in a rehearsal a tiny one in float32.

    Raises
    ------
    ValueError
        The name is unknown.
    """
    if name not in _CONFIGS:
        raise ValueError(f"model: must be one of {', '.join(NAMES)}, got {name!r}")
    dtype = "float32" if session.rehearsal else "bfloat16"
    path = folder / f"{name}-{'tiny' if session.rehearsal else dtype}"
    config = config_of(name, session.rehearsal)
    if not path.is_dir():
        write_random(config, path, getattr(torch, dtype), session.device)
    return Checkpoint(path, dtype, config.vocab_size, ModelShape.of_checkpoint(path, dtype))


def config_of(name: str, tiny: bool) -> transformers.PretrainedConfig:
    """The published configuration, or a tiny one with the same options."""
    kind, facts = _CONFIGS[name]
    return kind(**(facts | _TINY if tiny else facts))


def write_random(
    config: transformers.PretrainedConfig,
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a checkpoint: norms are 1, all other weights are normal with the configuration's deviation.

    The folder appears only when it is complete.

    Parameters
    ----------
    path
        Folder of the checkpoint; must not exist.
    device
        Device that draws the numbers.
    shard_bytes
        Largest size of a file, unless a single tensor is larger.
    """
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    config.architectures = [type(model).__name__]
    config.dtype = dtype
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    config.save_pretrained(partial)
    shards = list(_shards(shapes, dtype.itemsize, shard_bytes))
    generator = torch.Generator(device).manual_seed(SEED)
    places = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        tensors = {}
        for name in names:
            tensor = torch.empty(shapes[name], dtype=dtype, device=device)
            if tensor.dim() == 1:
                tensor.fill_(1.0)
            else:
                tensor.normal_(0.0, config.initializer_range, generator=generator)
            tensors[name] = tensor.cpu()
        save_file(tensors, partial / file, metadata={"format": "pt"})
        places |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": _count(shapes) * dtype.itemsize}, "weight_map": places}
    (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    partial.rename(path)


def num_bytes(path: Path) -> int:
    """Bytes of a checkpoint's weight files."""
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def _shards(
    shapes: dict[str, tuple[int, ...]], element_bytes: int, limit: int
) -> Iterator[list[str]]:
    """Tensor names in order, in groups of at most `shard_bytes`."""
    names: list[str] = []
    held = 0
    for name, shape in shapes.items():
        size = element_bytes * _count({name: shape})
        if names and held + size > limit:
            yield names
            names, held = [], 0
        names.append(name)
        held += size
    yield names


def _count(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes.values())
