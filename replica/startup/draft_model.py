"""The draft model of speculation: checks that it fits the served model, and loads it as a runner of its own.

The runner has the same number of blocks, of the same number of tokens, so a block id names a block of each pool. It has
no host tier and no adapters.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quire.replica.checkpoint.checkpoint import DownloadError, resolve_checkpoint
from quire.replica.checkpoint.model_spec import CheckpointError, ModelSpec, read_json
from quire.replica.checkpoint.weight_bytes import ELEMENT_BYTES, weight_bytes
from quire.replica.config import EngineArgs, EngineConfig, SizingError
from quire.replica.device.device import Device
from quire.replica.device.kv_pool import block_elements
from quire.replica.host_machine import physical_cores
from quire.replica.model.fusion.fuse_report import FuseReport
from quire.replica.model.loader import load_model
from quire.replica.model.own_attention import has_own_attention
from quire.replica.model.text_part import text_tensor_names
from quire.replica.runner.runner import Runner
from quire.replica.speculation_options import SpeculationOptions
from quire.replica.startup.device_memory import measure_memory
from quire.replica.startup.memory_table import NO_DRAFT_MODEL, DraftBytes, MeasuredMemory
from quire.replica.startup.sizing import choose_dtype, choose_sizing, choose_weights


@dataclass(slots=True)
class DraftModel:
    """A checkpoint that drafts, and its formats. Call `load`, on a GPU `measure`, then `start`."""

    spec: ModelSpec
    dtype: str
    weights: str
    num_bytes: DraftBytes
    _model: torch.nn.Module | None = None
    _fused: FuseReport | None = None

    def config(self, config: EngineConfig) -> EngineConfig:
        """The configuration of its runner, for that of the engine."""
        max_model_len = min(config.max_model_len, self.spec.max_position_embeddings)
        has_mixed_graphs = config.q_padding is not None and config.q_padding <= max_model_len
        formats: dict[str, Any] = {"dtype": self.dtype, "weights": self.weights}
        return dataclasses.replace(
            config,
            **formats,
            model_name=str(self.spec.path),
            kv_cache_dtype="auto",
            max_model_len=max_model_len,
            groups=self.spec.groups,
            hidden_size=self.spec.hidden_size,
            # Drafts change no token, so they need not be the same in every batch.
            deterministic=False,
            # The leader alone drafts.
            tensor_parallel=1,
            reduction_splits=1,
            num_host_blocks=0,
            max_loaded_adapters=0,
            cache_packed_weights=False,
            q_padding=config.q_padding if has_mixed_graphs else None,
            speculation=SpeculationOptions(),
        )

    def load(self, config: EngineConfig) -> None:
        """Load the weights for an engine with this configuration."""
        self._model = load_model(self.spec, config.device, self.dtype, self.weights)

    def measure(
        self, config: EngineConfig, device: Device, measured: MeasuredMemory
    ) -> MeasuredMemory:
        """On a GPU, add its workspace and its graphs to the measured memory of the other model."""
        assert self._model is not None
        own, self._fused = measure_memory(
            self.config(config), self.spec, self._model, device, measured.available
        )
        return dataclasses.replace(
            measured,
            workspace=measured.workspace + own.workspace,
            graphs=measured.graphs + own.graphs,
        )

    def start(self, config: EngineConfig, device: Device) -> Runner:
        """Allocate its pool and warm up."""
        assert self._model is not None
        own = self.config(config)
        runner = Runner.with_pool(own, self.spec, self._model, device=device, fused=self._fused)
        runner.warm_up()
        return runner


def find_draft_model(args: EngineArgs, target: ModelSpec) -> DraftModel | None:
    """Read the shape of the draft model; None: the options ask for none.

    Parameters
    ----------
    target
        Shape of the served model.

    Raises
    ------
    SizingError
        One of the two models cannot be used with the other.
    """
    name = args.speculation.draft_model
    if name is None:
        return None
    try:
        spec = ModelSpec.from_checkpoint(resolve_checkpoint(name))
    except DownloadError:
        raise
    except CheckpointError as error:
        raise SizingError(f"speculation.draft_model: {error}") from error
    if (problem := _problem(spec, target)) is not None:
        raise SizingError(f"speculation.draft_model is {name!r}, {problem}")
    sizing = choose_sizing(args.device, args.num_threads or physical_cores())
    own = dataclasses.replace(args, weights="auto", kv_cache_dtype="auto")
    weights = choose_weights(own, spec, sizing.device)
    dtype = choose_dtype(own, spec, weights, sizing, spec.path)
    block_size, element = sizing.choose_block_size(args), ELEMENT_BYTES[dtype]
    block = block_elements(spec.groups, block_size) * element
    # On a GPU attention's workspace grows with the pool.
    block += sizing.attention_bytes(own, spec, block_size, element).per_block
    loaded = weight_bytes(spec.path, dtype, weights, text_tensor_names(spec))
    return DraftModel(spec, dtype, weights, DraftBytes(loaded, block))


def draft_bytes(draft: DraftModel | None) -> DraftBytes:
    """The memory of the draft model, if there is one."""
    return NO_DRAFT_MODEL if draft is None else draft.num_bytes


def _problem(spec: ModelSpec, target: ModelSpec) -> str | None:
    """Why a checkpoint cannot draft for the served model, or None."""
    if target.has_states or not target.groups[0].is_full:
        kind = "recurrent layers" if target.has_states else "no layer with full attention"
        return f"and the served model {target.architecture} has {kind}; use another method"
    kinds = {
        "recurrent layers": spec.has_states,
        "latent attention": any(group.values_in_keys for group in spec.groups),
        "an attention of its own": has_own_attention(spec),
        "layers without full attention, or of several shapes": len(spec.groups) > 1
        or not spec.groups[0].is_full,
    }
    if found := [kind for kind, has_it in kinds.items() if has_it]:
        return f"whose {spec.architecture} has {found[0]}, which a draft model must not have"
    if spec.vocab_size != target.vocab_size:
        return (
            f"whose vocab_size is {spec.vocab_size}; it must be {target.vocab_size}, as that of the "
            "served model"
        )
    own, wanted = (vocabulary_digest(path) for path in (spec.path, target.path))
    if own != wanted and own is not None and wanted is not None:
        return (
            f"whose tokenizer.json has a vocabulary of digest {own}; it must be {wanted}, as that of "
            "the served model"
        )
    return None


def vocabulary_digest(folder: Path) -> str | None:
    """Digest of all pairs of token and id in tokenizer.json; None without this file."""
    tokenizer = read_json(folder / "tokenizer.json", optional=True)
    if not tokenizer:
        return None
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    if not isinstance(vocabulary, Mapping):  # Unigram: (token, score) in the order of ids
        vocabulary = {piece: i for i, (piece, _) in enumerate(vocabulary)}
    added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or ()}
    pairs = sorted({**vocabulary, **added}.items())
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()[:16]
